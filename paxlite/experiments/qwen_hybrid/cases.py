"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, DELTA

_SHARED = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
              shared_expert_intermediate_size=20)  # fmt: skip

CASES = {
  'qwen3_5_text': BLOCK | DELTA,
  'qwen3_5_moe_text': BLOCK | DELTA | _SHARED,
  'qwen3_next': BLOCK | DELTA | _SHARED | dict(norm_topk_prob=False),
}  # fmt: skip
