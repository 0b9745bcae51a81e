"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

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
ON_MESHES: dict[str, dict[str, Any]] = {'nemotron_h': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'MAMBA_HEADS=4 is not divisible by MAMBA_GROUPS=3': ('nemotron_h', dict(n_groups=3)),
  'moe_latent_size=16': ('nemotron_h', dict(moe_latent_size=16)),
  'hybrid_override_pattern=.MX. must be of': (
    'nemotron_h', dict(layers_block_type=None, hybrid_override_pattern='MX'),
  ),
  'tie_word_embeddings=True': ('nemotron_h', dict(tie_word_embeddings=True)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  del config['hidden_act'], config['rope_parameters'], config['num_hidden_layers']
  groups, expert_groups = pick(1, 2, 3), pick(1, 2, 4)
  kinds = ('linear_attention', 'full_attention', 'mlp', 'moe')
  config |= dict(
    tie_word_embeddings=False, layer_norm_epsilon=config.pop('rms_norm_eps'),
    layers_block_type=[pick(*kinds) for _ in range(draw.layers)] + ['full_attention'],
    mlp_hidden_act=pick('relu2', 'silu'), mamba_hidden_act=pick('silu', 'gelu'),
    mlp_bias=chance(), use_bias=chance(), use_conv_bias=chance(), n_groups=groups,
    mamba_num_heads=groups * pick(1, 2, 3), mamba_head_dim=pick(4, 6), ssm_state_size=pick(4, 10),
    conv_kernel=pick(2, 4), chunk_size=pick(8, 32), time_step_min=pick(0.001, 0.5),
    n_routed_experts=8, num_experts_per_tok=pick(1, 2), moe_intermediate_size=pick(8, 20),
    moe_shared_expert_intermediate_size=pick(8, 12), routed_scaling_factor=pick(1.0, 2.5),
    n_group=expert_groups, topk_group=pick(1, expert_groups), norm_topk_prob=chance(),
  )  # fmt: skip
  return config
