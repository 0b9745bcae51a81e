"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

_NEMOTRON = {k: v for k, v in BLOCK.items() if k != 'num_hidden_layers'} | dict(
  head_dim=10, mamba_num_heads=4, mamba_head_dim=6, n_groups=2, ssm_state_size=12, conv_kernel=3,
  time_step_min=0.4, n_routed_experts=8, moe_intermediate_size=24,
  moe_shared_expert_intermediate_size=20,
)  # fmt: skip

CASES = {
  'nemotron_h': _NEMOTRON
  | dict(
    layers_block_type=['linear_attention', 'moe', 'full_attention', 'mlp', 'linear_attention'],
    use_bias=True, mlp_bias=True, num_experts_per_tok=3, n_group=4, topk_group=2,
    routed_scaling_factor=1.5,
  ),
  'nemotron_h dense': _NEMOTRON
  | dict(layers_block_type=['linear_attention', 'mlp', 'full_attention', 'mlp'] * 2),
}  # fmt: skip
