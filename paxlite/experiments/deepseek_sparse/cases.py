"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw
from paxlite.experiments.deepseek.cases import LATENT, drawn_latent

# with few heads, many scores would be 0, and transformers may take any of them
INDEXER = dict(index_topk=5, index_head_dim=6, index_n_heads=24)

CASES = {
  'deepseek_v32': BLOCK
  | LATENT
  | INDEXER
  | dict(q_lora_rank=12, n_group=4, topk_group=2),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'deepseek_v32': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'QUERY_LATENT_DIMS must be above 0': ('deepseek_v32', dict(q_lora_rank=None)),
  'INDEXER_DIMS_PER_HEAD=2 must be at least': ('deepseek_v32', dict(index_head_dim=2)),
  'layer_types=.* must have indexed_attention': (
    'deepseek_v32', dict(layer_types=['full_attention'] * 4),
  ),
  'indexers that layers share .1 of 4': ('deepseek_v32', dict(index_topk_pattern='FFSF')),
  'indexers that layers share .2 of 4': ('deepseek_v32', dict(index_topk_freq=4)),
  'rope_interleave=False': ('deepseek_v32', dict(rope_interleave=False)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  config, draw = drawn_latent(kind, seed)
  return config | drawn_indexer(draw)


def drawn_indexer(draw: Draw) -> dict[str, Any]:
  """Returns the keys of an indexer of keys."""
  index_topk, index_head_dim = draw.pick(3, 8, 30), draw.pick(6, 12)
  return dict(
    q_lora_rank=12, index_topk=index_topk, index_head_dim=index_head_dim, index_n_heads=24
  )
