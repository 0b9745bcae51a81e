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
# What published files say, apart from keys that every file has, by the names of their classes.
PUBLISHED: dict[str, dict[str, Any]] = {
  'GLM4_7_Flash': dict(
    model_type='glm4_moe_lite', hidden_size=2048, intermediate_size=10240, num_hidden_layers=47,
    num_attention_heads=20, num_key_value_heads=20, vocab_size=154880, kv_lora_rank=512,
    q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
    moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
    first_k_dense_replace=1, n_group=1, topk_group=1, topk_method='noaux_tc', norm_topk_prob=True,
    routed_scaling_factor=1.8, num_nextn_predict_layers=1, rope_theta=1000000.0, rope_scaling=None,
    partial_rotary_factor=1.0, attention_bias=False, hidden_act='silu', rms_norm_eps=1e-5,
    max_position_embeddings=202752, tie_word_embeddings=False,
  ),
  'GLM5_744B': dict(
    model_type='glm_moe_dsa', hidden_size=6144, intermediate_size=12288, num_hidden_layers=78,
    num_attention_heads=64, num_key_value_heads=64, vocab_size=154880, kv_lora_rank=512,
    q_lora_rank=2048, qk_head_dim=256, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=1, topk_group=1, topk_method='noaux_tc',
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.5, ep_size=1, head_dim=64,
    num_nextn_predict_layers=1, attention_bias=False, hidden_act='silu', pretraining_tp=1,
    index_head_dim=128, index_n_heads=32, index_topk=2048, indexer_rope_interleave=True,
    rope_interleave=True,
    rope_parameters=dict(rope_theta=1000000, rope_type='default'),
    max_position_embeddings=202752, rms_norm_eps=1e-5, tie_word_embeddings=False,
  ),
}  # fmt: skip
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
