"""How the published models of MiniMax-M2 are stored; see weights.family."""

import dataclasses

from paxlite.core.errors import UserError
from paxlite.experiments.minimax_m2 import MiniMaxM2
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  EXPERT_SILU,
  EXPERTS_PER_TOKEN,
  GIVEN_HEADS,
  UNTIED,
  either,
  only,
  unread,
)
from paxlite.weights.known_keys import shortened
from paxlite.weights.rope_keys import rope

MINIMAX_M2_NAMES = tensor_names.MIXTRAL | {
  'router_balance': 'model.layers.{i}.block_sparse_moe.e_score_correction_bias'
}


def _rotated() -> Both:
  """Returns the keys of rotary positions, whose share of a head old files state as rotary_dim."""
  plain = rope(theta=5e6, fraction=1.0)

  def read(config: Config) -> dict[str, object]:
    rotated = config.get('rotary_dim')
    if rotated is not None:
      config = {'partial_rotary_factor': rotated / config['head_dim']} | dict(config)
    return plain.read(config)

  return dataclasses.replace(plain, theirs=(*plain.theirs, 'rotary_dim'), read=read)


def _read_kinds(config: Config) -> dict[str, object]:
  kinds = config.get('attn_type_list')
  if kinds is not None and set(kinds) != {1}:
    raise UserError(f'attn_type_list={shortened(kinds)} is not supported: only 1 is')
  return {}


# transformers does not read those from `only` on, and leaves out the modules that predict further
# tokens.
MINIMAX_M2 = (
  EXPERT_SILU,
  EXPERTS_PER_TOKEN,
  either('NUM_EXPERTS', 'num_local_experts', 'num_experts'),
  _rotated(),
  Both(('attn_type_list',), (), _read_kinds, lambda e: {}),
  only('use_qk_norm', True),
  only('qk_norm_type', 'per_layer'),
  only('scoring_func', 'sigmoid'),
  only('use_routing_bias', True),
  only('shared_intermediate_size', 0),
  only('sliding_window', None),
  only('attention_bias', False),
  only('layernorm_full_attention_beta', 1.0),
  only('layernorm_linear_attention_beta', 1.0),
  only('layernorm_mlp_beta', 1.0),
  unread(
    'mlp_intermediate_size', 'mtp_transformer_layers', 'num_mtp_modules', 'shared_moe_mode',
    'use_mtp',
  ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
  'minimax_m2': Family(
    'MiniMaxM2ForCausalLM', MiniMaxM2, (*GIVEN_HEADS, UNTIED, *MINIMAX_M2), MINIMAX_M2_NAMES,
    classifier=None,
  ),
}  # fmt: skip
