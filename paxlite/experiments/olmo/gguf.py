"""How llama.cpp stores OLMo 2; see weights.gguf_architecture."""

from paxlite.weights.gguf_architecture import SILU, SIZES, Architecture

ARCHITECTURES = (
  Architecture(
    'olmo2', 'olmo2', SIZES, {**SILU, 'tie_word_embeddings': (False,)}, spans_model=True
  ),
)
