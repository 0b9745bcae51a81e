"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, EXPERTS

CASES = {
  'qwen2': BLOCK,
  'qwen2 window': BLOCK
  | dict(use_sliding_window=True, sliding_window=6, max_window_layers=2, tie_word_embeddings=True),
  'qwen3': BLOCK | dict(head_dim=10),
  'qwen3_moe': BLOCK | EXPERTS | dict(head_dim=10, moe_intermediate_size=24, norm_topk_prob=True),
}  # fmt: skip
