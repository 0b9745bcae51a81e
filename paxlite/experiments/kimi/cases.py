"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK
from paxlite.experiments.deepseek.cases import LATENT

_KIMI = {k: v for k, v in LATENT.items() if k not in (
  'n_routed_experts', 'first_k_dense_replace', 'rope_parameters'
)} | dict(
  num_experts=8, linear_head_dim=6, linear_num_heads=3, linear_conv_kernel_dim=3,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip

CASES = {
  'kimi_linear': BLOCK | _KIMI | dict(n_group=4, topk_group=2, q_lora_rank=12),
  'kimi_linear dense': BLOCK
  | _KIMI
  | dict(
    num_shared_experts=2, moe_renormalize=False,
    mlp_layer_types=['dense', 'dense', 'sparse', 'sparse'],
  ),
}  # fmt: skip
