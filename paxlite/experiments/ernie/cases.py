"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

CASES = {
  'ernie4_5': BLOCK | dict(head_dim=10, use_bias=True, tie_word_embeddings=False),
  'ernie4_5_moe': BLOCK
  | dict(
    num_hidden_layers=6, use_bias=True, tie_word_embeddings=False, moe_num_experts=8, moe_k=3,
    moe_num_shared_experts=2, moe_intermediate_size=24, moe_layer_start_index=2,
    moe_layer_interval=2,
  ),
}  # fmt: skip
