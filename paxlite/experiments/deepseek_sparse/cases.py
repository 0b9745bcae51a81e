"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK
from paxlite.experiments.deepseek.cases import LATENT

# with few heads, many scores would be 0, and transformers may take any of them
INDEXER = dict(index_topk=5, index_head_dim=6, index_n_heads=24)

CASES = {
  'deepseek_v32': BLOCK
  | LATENT
  | INDEXER
  | dict(q_lora_rank=12, n_group=4, topk_group=2),
}  # fmt: skip
