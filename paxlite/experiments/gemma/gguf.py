"""How llama.cpp stores Gemma 1, 2 and 3; see weights.gguf_architecture."""

from collections.abc import Mapping, Sequence

from paxlite.core.json_text import Json, JsonObject
from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import SIZES, WINDOW, Architecture

CAP = {'final_logit_softcapping': 'final_logit_softcapping'}
GELU: Mapping[str, Sequence[Json]] = {
  'hidden_act': ('gelu_pytorch_tanh',), 'hidden_activation': ('gelu_pytorch_tanh', None),
  'attention_bias': (False,), 'use_bidirectional_attention': (False,),
}  # fmt: skip
_UNCAPPED: Mapping[str, Sequence[Json]] = {**GELU, 'attn_logit_softcapping': (None,)}
_TIED: Mapping[str, Sequence[Json]] = {'tie_word_embeddings': (True,)}


class Gemma2Architecture(Architecture):
  """llama.cpp caps scores and logits of each Gemma 2."""

  def refused(self, config: Config) -> JsonObject:
    return {k: config[k] for k in config if k.endswith('_softcapping') and config[k] is None}


ARCHITECTURES = (
  Architecture(
    'gemma', 'gemma', SIZES, {**_UNCAPPED, **_TIED}, norm_offset=1.0, stretchings=('linear',)
  ),
  Gemma2Architecture(
    'gemma2', 'gemma2',
    SIZES | WINDOW | CAP | {'attn_logit_softcapping': 'attn_logit_softcapping'},
    {**GELU, **_TIED}, norm_offset=1.0, stretchings=('linear',), scaled_layers=46,
  ),
  Architecture(
    'gemma3_text', 'gemma3',
    SIZES | WINDOW | CAP | {'rope.freq_base_swa': 'rope_local_base_freq'},
    _UNCAPPED, norm_offset=1.0, stretchings=('linear',), scaled_layers=62,
  ),
)  # fmt: skip
