"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK
from paxlite.experiments.deepseek.cases import LATENT, drawn_latent
from paxlite.experiments.deepseek_sparse.cases import INDEXER, drawn_indexer

CASES = {
  'glm4_moe_lite': BLOCK
  | {k: v for k, v in LATENT.items() if k != 'first_k_dense_replace'}
  | dict(
    q_lora_rank=12, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=1.5,
    mlp_layer_types=['dense', 'dense', 'sparse', 'sparse'],
  ),
  'glm_moe_dsa': BLOCK
  | LATENT
  | INDEXER
  | dict(q_lora_rank=12, n_group=1, topk_group=1, index_topk=9),
  'glm_moe_dsa linked': BLOCK
  | LATENT
  | INDEXER
  | dict(
    q_lora_rank=12, n_group=1, topk_group=1, index_topk=9,
    indexer_types=['full', 'shared', 'full', 'shared'],
  ),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'glm_moe_dsa linked': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'mlp_layer_types=.* dense blocks first': (
    'glm4_moe_lite', dict(mlp_layer_types=['sparse', 'dense', 'sparse', 'sparse']),
  ),
  'first_k_dense_replace=3 and the 2 dense blocks': (
    'glm4_moe_lite', dict(first_k_dense_replace=3),
  ),
  'indexer_types=.*the first one full': (
    'glm_moe_dsa', dict(indexer_types=['shared', 'full', 'full', 'full']),
  ),
  'index_topk_pattern=.FFXF.*must have full or': (
    'glm_moe_dsa', dict(indexer_types=None, index_topk_pattern='FFXF'),
  ),
  'indexer_rope_interleave=False': ('glm_moe_dsa', dict(indexer_rope_interleave=False)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  config, draw = drawn_latent(kind, seed)
  if kind == 'glm_moe_dsa':
    config |= drawn_indexer(draw)
    config['indexer_types'] = [
      'full',
      *(draw.pick('full', 'shared') for _ in range(draw.layers - 1)),
    ]
  if kind == 'glm4_moe_lite':
    dense = config.pop('first_k_dense_replace')
    config['mlp_layer_types'] = ['dense'] * dense + ['sparse'] * (draw.layers - dense)
  return config
