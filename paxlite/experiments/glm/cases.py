"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, YARN

CASES = {
  'glm4': BLOCK | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
  'glm4_moe': BLOCK
  | dict(
    head_dim=12, attention_bias=True, use_qk_norm=True, n_routed_experts=8, n_shared_experts=2,
    num_experts_per_tok=3, moe_intermediate_size=24, n_group=4, topk_group=2,
    routed_scaling_factor=1.5,
  ),
}  # fmt: skip
