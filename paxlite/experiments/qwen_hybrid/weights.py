"""How the published models of Qwen3-Next and Qwen3.5 are stored; see weights.family."""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.qwen_hybrid import Qwen3_5, Qwen3_5Moe, Qwen3Next
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, OneOf, Same, activation
from paxlite.weights.delta_keys import DELTA_KINDS, DELTA_NET, hybrid_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  EXPERTS_PER_TOKEN,
  GIVEN_HEADS,
  NO_BIAS,
  SILU,
  UNTIED,
  either,
  only,
  unread,
)
from paxlite.weights.prediction_keys import ONE_PREDICTION_MODULE
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_layout import delta_net_entries

DELTA_NET_NAMES = {
  'delta_gate': 'model.layers.{i}.linear_attn.in_proj_z.weight',
  'delta_beta': 'model.layers.{i}.linear_attn.in_proj_b.weight',
  'delta_decay_input': 'model.layers.{i}.linear_attn.in_proj_a.weight',
  'delta_convolution': 'model.layers.{i}.linear_attn.conv1d.weight',
  'delta_rate': 'model.layers.{i}.linear_attn.A_log',
  'delta_bias': 'model.layers.{i}.linear_attn.dt_bias',
  'delta_norm': 'model.layers.{i}.linear_attn.norm.weight',
  'delta_post': 'model.layers.{i}.linear_attn.out_proj.weight',
}
# Queries and gates of a head of attention follow each other in one tensor.
_GATED = {'query_gate': 'model.layers.{i}.self_attn.q_proj.weight'}
_SHARED = {
  'shared_gate': 'model.layers.{i}.mlp.shared_expert.gate_proj.weight',
  'shared_up': 'model.layers.{i}.mlp.shared_expert.up_proj.weight',
  'shared_down': 'model.layers.{i}.mlp.shared_expert.down_proj.weight',
  'shared_factor': 'model.layers.{i}.mlp.shared_expert_gate.weight',
}
# The blocks of modules that predict further tokens have other names than those of the model.
_MTP = {
  'prediction_layer': 'mtp.layers.{i}.',
  'prediction_embedding_norm': 'mtp.pre_fc_norm_embedding.weight',
  'prediction_hidden_norm': 'mtp.pre_fc_norm_hidden.weight',
  'prediction_projection': 'mtp.fc.weight',
  'prediction_norm': 'mtp.norm.weight',
}
QWEN3_5 = tensor_names.HUGGING_FACE | DELTA_NET_NAMES | _GATED | _SHARED | _MTP | {
  'delta_joined': 'model.layers.{i}.linear_attn.in_proj_qkv.weight',
}  # fmt: skip
QWEN3_NEXT = tensor_names.HUGGING_FACE | DELTA_NET_NAMES | _GATED | _SHARED | _MTP | {
  'delta_packed': 'model.layers.{i}.linear_attn.in_proj_qkvz.weight',
  'delta_packed_gates': 'model.layers.{i}.linear_attn.in_proj_ba.weight',
}  # fmt: skip
DELTA_TYPES = hybrid_types(DELTA_KINDS)
SHARED_EXPERT = Same('shared_expert_intermediate_size', 'SHARED_EXPERT_HIDDEN_DIMS')


def expert_width(other: int = 0) -> Both:
  """Returns the width of experts, which all blocks have; some files have that of other blocks too.

  Args:
    other: The width of other blocks in files that do not say it; 0: that of an expert.
  """

  def read(config: Config) -> dict[str, object]:
    width = config['moe_intermediate_size']
    hidden = config.get('intermediate_size', other or width)
    return {'EXPERT_HIDDEN_DIMS': width, 'HIDDEN_DIMS': hidden}

  return Both(
    ('moe_intermediate_size', 'intermediate_size'),
    ('EXPERT_HIDDEN_DIMS', 'HIDDEN_DIMS'),
    read,
    lambda e: {
      'moe_intermediate_size': e.values()['EXPERT_HIDDEN_DIMS'],
      'intermediate_size': e.HIDDEN_DIMS,
    },
  )


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
TEXT_DEFAULTS = {'qwen3_5': QWEN3_5_DEFAULTS, 'qwen3_5_moe': QWEN3_5_MOE_DEFAULTS}

FAMILIES: dict[str, Family] = {
  'qwen3_5_text': Family(
    'Qwen3_5ForCausalLM', Qwen3_5, (*GIVEN_HEADS, SILU, *_HYBRID), QWEN3_5,
    classifier='Qwen3_5TextForSequenceClassification',
    layers={'gated_delta': delta_net_entries},
  ),
  'qwen3_5_moe_text': Family(
    'Qwen3_5MoeForCausalLM', Qwen3_5Moe,
    (*_EXPERTS, expert_width(), OneOf('norm_topk_prob', True), only('mlp_only_layers', [])),
    QWEN3_5, packs_experts=True,
    classifier=None,
    layers={'gated_delta': delta_net_entries},
  ),
  'qwen3_next': Family(
    'Qwen3NextForCausalLM', Qwen3Next,
    (
      *_EXPERTS, expert_width(5632), OneOf('decoder_sparse_step', 1), OneOf('mlp_only_layers', []),
      Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=True),
    ),
    QWEN3_NEXT,
    layers={'gated_delta': delta_net_entries},
  ),
}  # fmt: skip
