"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

_V4 = dict(
  num_hidden_layers=6, num_key_value_heads=1, head_dim=16, q_lora_rank=12, moe_intermediate_size=24,
  num_experts_per_tok=3, n_routed_experts=8, partial_rotary_factor=0.5, num_hash_layers=2,
  hc_mult=3,
  compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=5),
  layer_types=['sliding_attention', *(
    ['heavily_compressed_attention', 'compressed_sparse_attention'] * 3
  )[:5]],
  sliding_window=6, o_groups=2, o_lora_rank=10, index_n_heads=24, index_head_dim=12, index_topk=3,
  swiglu_limit=0.7, rope_theta=1e2, compress_rope_theta=1e3,
  rope_parameters=dict(
    rope_type='yarn', factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0,
  ),
)  # fmt: skip

CASES = {
  'deepseek_v4': BLOCK | _V4,
  'deepseek_v4 plain': BLOCK
  | _V4
  | dict(
    num_hash_layers=0, tie_word_embeddings=True, rope_parameters=None, hc_mult=2,
    layer_types=['compressed_sparse_attention', 'sliding_attention'] * 3, index_topk=50,
  ),
}  # fmt: skip
