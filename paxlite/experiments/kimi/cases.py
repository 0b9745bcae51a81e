"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw
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
# one layer of each kind: of four layers, rows that are split over devices alone, of which each is
# computed as before, have gradients that differ by 1.4e-5 of the largest
ON_MESHES: dict[str, dict[str, Any]] = {
  'kimi_linear': dict(
    num_hidden_layers=2,
    layer_types=['linear_attention', 'full_attention'],
    mlp_layer_types=['dense', 'sparse'],
  )
}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'mlp_layer_types must have 4 of dense': (
    'kimi_linear', dict(mlp_layer_types=['sparse', 'dense', 'sparse', 'sparse']),
  ),
  'linear_attn_config has gate_lower_bound': (
    'kimi_linear', dict(linear_attn_config=dict(gate_lower_bound=-5.0)),
  ),
  'linear_attn_config must have each of the numbers 1 to 4': (
    'kimi_linear',
    dict(layer_types=None, linear_attn_config=dict(kda_layers=[1, 2], full_attn_layers=[4])),
  ),
  'mla_use_nope=False': ('kimi_linear', dict(mla_use_nope=False)),
  'num_shared_experts=0 must be': ('kimi_linear', dict(num_shared_experts=0)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  groups, dense = pick(1, 2, 4), pick(*range(draw.layers + 1))
  del config['head_dim'], config['rope_parameters']
  config |= dict(
    num_key_value_heads=draw.heads, q_lora_rank=pick(None, 12), kv_lora_rank=pick(8, 20),
    qk_nope_head_dim=pick(4, 10), qk_rope_head_dim=pick(4, 6), v_head_dim=pick(4, 10),
    num_experts=8, num_experts_per_token=pick(1, 2), moe_intermediate_size=pick(8, 20),
    num_shared_experts=pick(1, 2), routed_scaling_factor=pick(1.0, 2.5), num_expert_group=groups,
    topk_group=pick(1, groups), moe_renormalize=chance(), tie_word_embeddings=False,
    # of 4 numbers, a norm may be almost 0, and what transformers rounds is then seen
    linear_head_dim=pick(8, 12, 16), linear_num_heads=pick(1, 2, 3),
    linear_conv_kernel_dim=pick(2, 3, 4),
    num_hidden_layers=draw.layers + 1,
    mlp_layer_types=['dense'] * dense + ['sparse'] * (draw.layers + 1 - dense),
    layer_types=['linear_attention', *(pick('linear_attention', 'full_attention')
                 for _ in range(draw.layers - 1)), 'full_attention'],  # transformers needs both
  )  # fmt: skip
  return config
