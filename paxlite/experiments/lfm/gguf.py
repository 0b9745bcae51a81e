"""How llama.cpp stores LFM2; see weights.gguf_architecture."""

from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import PLAIN, Architecture


class Lfm2Architecture(Architecture):
  """Blocks with a convolution have no heads of keys."""

  def own_fields(self, config: Config) -> dict[str, object]:
    heads = config['num_key_value_heads']
    kinds = config['layer_types']
    return {'attention.head_count_kv': [heads * (kind == 'full_attention') for kind in kinds]}


ARCHITECTURES = (
  Lfm2Architecture(
    'lfm2', 'lfm2',
    {k: v for k, v in PLAIN.items() if v != 'rms_norm_eps'} | {
      'attention.layer_norm_rms_epsilon': 'norm_eps', 'shortconv.l_cache': 'conv_L_cache',
    },
    {
      'conv_bias': (False,), 'block_auto_adjust_ff_dim': (False,), 'use_pos_enc': (True,),
      'block_use_swiglu': (True,),
    },
    spans_model=True, stretchings=(),
  ),
)  # fmt: skip
