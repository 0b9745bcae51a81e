"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN, Draw

CASES = {
  'minimax_m2': BLOCK
  | EXPERTS
  | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'minimax_m2': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'attn_type_list=': ('minimax_m2', dict(attn_type_list=[1, 0, 1, 1])),
  'use_routing_bias=False': ('minimax_m2', dict(use_routing_bias=False)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(), draw.pick
  rope = draw.partial_rope()
  config |= dict(
    num_local_experts=pick(4, 6), num_experts_per_tok=pick(1, 2, 3), rope_parameters=rope
  )
  return config
