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
# What published files say, apart from keys that every file has, by the names of their classes.
PUBLISHED: dict[str, dict[str, Any]] = {
  'DeepSeekV3_2_671B': dict(
    model_type='deepseek_v32', hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, vocab_size=129280, kv_lora_rank=512,
    q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, topk_method='noaux_tc',
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.5, ep_size=1,
    num_nextn_predict_layers=1, rope_theta=10000, attention_bias=False, hidden_act='silu',
    index_head_dim=128, index_n_heads=64, index_topk=2048,
    rope_scaling=dict(
      type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
      original_max_position_embeddings=4096,
    ),
    quantization_config=dict(
      activation_scheme='dynamic', fmt='e4m3', quant_method='fp8', scale_fmt='ue8m0',
      weight_block_size=[128, 128],
    ),
    max_position_embeddings=163840, rms_norm_eps=1e-6, tie_word_embeddings=False,
  ),
}  # fmt: skip
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
