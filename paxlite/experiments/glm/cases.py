"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, YARN, Draw

CASES = {
  'glm4': BLOCK | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
  'glm4_moe': BLOCK
  | dict(
    head_dim=12, attention_bias=True, use_qk_norm=True, n_routed_experts=8, n_shared_experts=2,
    num_experts_per_tok=3, moe_intermediate_size=24, n_group=4, topk_group=2,
    routed_scaling_factor=1.5,
  ),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'glm4_moe': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "use_qk_norm='false' must be true or false": ('glm4_moe', dict(use_qk_norm='false')),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  config['rope_parameters'] = draw.partial_rope()
  config['attention_bias'] = chance()
  if kind == 'glm4_moe':
    groups = pick(1, 2, 4)
    config |= dict(
      n_routed_experts=8, num_experts_per_tok=pick(1, 2), moe_intermediate_size=pick(8, 20),
      n_shared_experts=pick(1, 2), first_k_dense_replace=pick(0, 1, draw.layers),
      routed_scaling_factor=pick(1.0, 2.5), n_group=groups, topk_group=pick(1, groups),
      norm_topk_prob=chance(), use_qk_norm=chance(),
    )  # fmt: skip
  return config
