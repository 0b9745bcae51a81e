"""The published families with short convolutions and with Mamba 2; see family_tables."""

from paxlite.experiments.granite import GraniteHybrid
from paxlite.experiments.lfm import LFM2
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, Repeated, Same, activation, heads, positions
from paxlite.weights.family import Family
from paxlite.weights.family_keys import NO_MLP_BIAS, UNTIED, number
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_keys import (
  GRANITE_EXPERTS,
  GRANITE_TYPES,
  LFM2_BIAS,
  LFM2_TIED,
  LFM2_TYPES,
  LFM2_WIDTH,
  MAMBA_HEADS,
  STEP_LIMITS,
)

_COUNTS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
)
_FACTORS = (
  number('embedding_multiplier', 'EMBEDDING_FACTOR'),
  number('residual_multiplier', 'RESIDUAL_FACTOR'),
  number('attention_multiplier', 'ATTENTION_FACTOR'),
  number('logits_scaling', 'LOGITS_DIVISOR'),
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
  'granitemoehybrid': Family(
    'GraniteMoeHybridForCausalLM', GraniteHybrid,
    (
      *_COUNTS, heads(), Same('rms_norm_eps', 'LAYERNORM_EPSILON'), UNTIED, rope(),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
      Same('attention_bias', 'USE_BIAS', default=False), NO_MLP_BIAS,
      OneOf('normalization_function', 'rmsnorm'), *_FACTORS,
      GRANITE_TYPES, GRANITE_EXPERTS, MAMBA_HEADS, STEP_LIMITS,
      Same('mamba_n_groups', 'MAMBA_GROUPS', default=1),
      Same('mamba_d_state', 'MAMBA_STATE_DIMS', default=256),
      Same('mamba_d_conv', 'CONVOLUTION_WIDTH', default=4),
      Same('mamba_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      Same('mamba_proj_bias', 'USE_STATE_BIAS', default=False),
    ),
    tensor_names.GRANITE_HYBRID,
  ),
}  # fmt: skip
