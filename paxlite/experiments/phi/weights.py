"""How the published models of Phi are stored; see weights.family."""

from paxlite.experiments.phi import Phi, Phi3
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, activation, heads
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  LAYER_NORM_LENGTHS,
  NO_BIAS,
  NO_MLP_BIAS,
  SILU,
  SIZES,
  UNTIED,
  WINDOW,
  choice,
)
from paxlite.weights.rope_keys import rope

PHI3 = tensor_names.HUGGING_FACE | {
  'query_key_value': 'model.layers.{i}.self_attn.qkv_proj.weight',
  'gate_up': 'model.layers.{i}.mlp.gate_up_proj.weight',
}
PHI = tensor_names.HUGGING_FACE | {
  'final_norm': 'model.final_layernorm.weight', 'post': 'model.layers.{i}.self_attn.dense.weight',
  'up': 'model.layers.{i}.mlp.fc1.weight', 'down': 'model.layers.{i}.mlp.fc2.weight',
  'query_norm': 'model.layers.{i}.self_attn.q_layernorm.weight',
  'key_norm': 'model.layers.{i}.self_attn.k_layernorm.weight',
}  # fmt: skip

FAMILIES: dict[str, Family] = {
  'phi3': Family(
    'Phi3ForCausalLM', Phi3,
    (
      *SIZES, SILU, UNTIED, WINDOW, NO_BIAS, NO_MLP_BIAS, OneOf('lm_head_bias', False),
      OneOf('full_attn_mod', 1), OneOf('interpolate_factor', 1),
      rope('original_max_position_embeddings', fraction=1.0, is_phi3=True),
    ),
    PHI3,
  ),
  'phi': Family(
    'PhiForCausalLM', Phi,
    (
      *LAYER_NORM_LENGTHS, heads(), activation('hidden_act', written='gelu_new'), UNTIED,
      rope(fraction=0.5), choice('qk_layernorm', 'QK_NORM', 'none', 'per_head', default=False),
    ),
    PHI,
  ),
}  # fmt: skip
