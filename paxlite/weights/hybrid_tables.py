"""The published families of hybrid models; see family_tables."""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.olmo import OLMoHybrid
from paxlite.experiments.qwen_hybrid import Qwen3_5, Qwen3_5Moe, Qwen3Next
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, Same, activation
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  EXPERTS_PER_TOKEN,
  GIVEN_HEADS,
  NO_BIAS,
  SILU,
  SIZES,
  UNTIED,
  either,
  only,
  unread,
)
from paxlite.weights.hybrid_keys import (
  BETA_SCALE,
  DELTA_KINDS,
  DELTA_NET,
  DELTA_TYPES,
  SHARED_EXPERT,
  expert_width,
  types_without_positions,
)
from paxlite.weights.prediction_keys import ONE_PREDICTION_MODULE
from paxlite.weights.rope_keys import rope

# The last ones are in published files, and transformers does not read them.
_HYBRID = (
  UNTIED, *DELTA_NET, DELTA_TYPES, rope(fraction=0.25), NO_BIAS,
  only('attn_output_gate', True), only('output_gate_type', 'swish', None),
  only('use_sliding_window', False), only('sliding_window', None),
  unread('mamba_ssm_dtype'), ONE_PREDICTION_MODULE,
)  # fmt: skip
_SIZES = tuple(key for key in GIVEN_HEADS if 'intermediate_size' not in key.theirs)
_SILU = activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS'))
_EXPERTS = (
  *_SIZES, *_HYBRID, _SILU, EXPERTS_PER_TOKEN, SHARED_EXPERT,
  either('NUM_EXPERTS', 'num_experts', 'num_local_experts'),
)  # fmt: skip

# What text_config of models with images leaves out, because these are transformers' defaults.
_DEFAULTS: JsonObject = dict(
  vocab_size=248_320, num_attention_heads=16, head_dim=256, hidden_act='silu',
  max_position_embeddings=32_768, rms_norm_eps=1e-6, linear_conv_kernel_dim=4,
  linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
  linear_num_value_heads=32,
)  # fmt: skip
QWEN3_5_DEFAULTS = _DEFAULTS | dict(
  model_type='qwen3_5_text', hidden_size=4096, intermediate_size=12_288, num_hidden_layers=32,
  num_key_value_heads=4,
)  # fmt: skip
QWEN3_5_MOE_DEFAULTS = _DEFAULTS | dict(
  model_type='qwen3_5_moe_text', hidden_size=2048, num_hidden_layers=40, num_key_value_heads=2,
  moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=8,
  num_experts=256,
)  # fmt: skip

HYBRID_FAMILIES: dict[str, Family] = {
  'olmo_hybrid': Family(
    'OlmoHybridForCausalLM', OLMoHybrid,
    (
      *SIZES, SILU, UNTIED, NO_BIAS, *DELTA_NET, BETA_SCALE, types_without_positions(DELTA_KINDS),
    ),
    tensor_names.OLMO_HYBRID,
    other_names={'feedforward_layer_norm': 'post_attention_layernorm'},  # transformers' files
  ),
  'qwen3_5_text': Family(
    'Qwen3_5ForCausalLM', Qwen3_5, (*GIVEN_HEADS, SILU, *_HYBRID), tensor_names.QWEN3_5
  ),
  'qwen3_5_moe_text': Family(
    'Qwen3_5MoeForCausalLM', Qwen3_5Moe,
    (*_EXPERTS, expert_width(), OneOf('norm_topk_prob', True), only('mlp_only_layers', [])),
    tensor_names.QWEN3_5, packs_experts=True,
  ),
  'qwen3_next': Family(
    'Qwen3NextForCausalLM', Qwen3Next,
    (
      *_EXPERTS, expert_width(5632), OneOf('decoder_sparse_step', 1), OneOf('mlp_only_layers', []),
      Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=True),
    ),
    tensor_names.QWEN3_NEXT,
  ),
}  # fmt: skip
