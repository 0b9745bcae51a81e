"""How llama.cpp stores Llama and Mistral; see weights.gguf_architecture."""

from paxlite.weights.gguf_architecture import SILU, SIZES, Architecture

_STRETCHINGS = 'linear', 'yarn', 'llama3'

ARCHITECTURES = (
  Architecture('llama', 'llama', SIZES, SILU, 'interleaved', stretchings=_STRETCHINGS),
  Architecture('mistral', 'llama', SIZES, SILU, 'interleaved', stretchings=_STRETCHINGS),
)
