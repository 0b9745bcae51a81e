"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, YARN

LATENT = dict(
  num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
  n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, first_k_dense_replace=1,
  rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.8),
)  # fmt: skip

CASES = {
  'deepseek_v2': BLOCK
  | LATENT
  | dict(q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1),
  'deepseek_v2 groups': BLOCK
  | LATENT
  | dict(
    q_lora_rank=12, n_shared_experts=1, n_group=4, topk_group=2, topk_method='group_limited_greedy',
    routed_scaling_factor=1.5,
  ),
  'deepseek_v3': BLOCK | LATENT | dict(q_lora_rank=12, n_group=4, topk_group=2),
  # YaRN of Kimi K2, whose two bounds are one
  'deepseek_v3 one bound': BLOCK
  | LATENT
  | dict(q_lora_rank=12, n_group=1, topk_group=1,
         rope_parameters=YARN | dict(beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)),
  'mistral4': BLOCK
  | LATENT
  | dict(
    q_lora_rank=12, n_group=4, topk_group=2, routed_scaling_factor=1.5,
    rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.8, llama_4_scaling_beta=0.7),
  ),
}  # fmt: skip
