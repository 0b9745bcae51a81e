"""The published families with short convolutions and with Mamba 2; see family_tables."""

from paxlite.experiments.lfm import LFM2
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, Repeated, Same, heads, positions
from paxlite.weights.family import Family
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_keys import LFM2_BIAS, LFM2_TIED, LFM2_TYPES, LFM2_WIDTH

_COUNTS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
)

STATE_FAMILIES: dict[str, Family] = {
  'lfm2': Family(
    'Lfm2ForCausalLM', LFM2,
    (
      *_COUNTS, heads('num_key_value_heads'), Same('norm_eps', 'LAYERNORM_EPSILON', default=1e-5),
      Same('conv_L_cache', 'CONVOLUTION_WIDTH', default=3), rope(theta=1e6),
      LFM2_WIDTH, LFM2_TYPES, LFM2_BIAS, LFM2_TIED,
      # transformers does not read these
      Repeated('num_layers', 'num_hidden_layers'), Repeated('num_heads', 'num_attention_heads'),
      Repeated('block_dim', 'hidden_size'), Repeated('conv_dim', 'hidden_size'),
      Repeated('conv_dim_out', 'hidden_size'), Repeated('block_norm_eps', 'norm_eps'),
      Repeated('theta', 'rope_theta'), OneOf('use_pos_enc', True), OneOf('block_use_swiglu', True),
    ),
    tensor_names.LFM2,
  ),
}  # fmt: skip
