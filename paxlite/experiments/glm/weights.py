"""How the published models of GLM-4 and GLM-4.5 are stored; see weights.family."""

from paxlite.experiments.glm import GLM4, GLM4Moe
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Same
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  GIVEN_HEADS,
  GIVEN_KV,
  GROUPS,
  NORMALIZED,
  ROUTED_EXPERTS,
  SILU,
  UNTIED,
  choice,
)
from paxlite.weights.prediction_keys import PREDICTION_MODULES
from paxlite.weights.rope_keys import rope

GLM4_NAMES = tensor_names.OLMO2 | {
  'attention_post_norm': 'model.layers.{i}.post_self_attn_layernorm.weight',
  'ffn_post_norm': 'model.layers.{i}.post_mlp_layernorm.weight',
  'gate_up': 'model.layers.{i}.mlp.gate_up_proj.weight',
}
GLM4_MOE = tensor_names.SHARED_EXPERTS | tensor_names.PREDICTIONS

FAMILIES: dict[str, Family] = {
  'glm4': Family(
    'Glm4ForCausalLM', GLM4,
    (
      *GIVEN_HEADS, SILU, UNTIED, rope(fraction=0.5),
      Same('attention_bias', 'USE_QKV_BIAS', default=True),
    ),
    GLM4_NAMES, rotary='interleaved',
  ),
  'glm4_moe': Family(
    'Glm4MoeForCausalLM', GLM4Moe,
    (
      *GIVEN_KV, *ROUTED_EXPERTS, *GROUPS, NORMALIZED, UNTIED, rope(fraction=0.5),
      Same('attention_bias', 'USE_QKV_BIAS', default=False),
      choice('use_qk_norm', 'QK_NORM', 'none', 'per_head', default=False), PREDICTION_MODULES,
    ),
    GLM4_MOE,
    classifier=None,
  ),
}  # fmt: skip
