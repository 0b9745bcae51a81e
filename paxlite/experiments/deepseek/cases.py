"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, YARN, Draw

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
ON_MESHES: dict[str, dict[str, Any]] = {'deepseek_v3': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'norm_topk_prob=True': ('deepseek_v2', dict(norm_topk_prob=True)),
  'rope_interleave=None': ('deepseek_v3', dict(rope_interleave=None)),
  'it must be qk_rope_head_dim=4': ('deepseek_v3', dict(head_dim=2)),
  'more than the experts of NUM_EXPERT_GROUPS_PER_TOKEN=2': (
    'deepseek_v3', dict(num_experts_per_tok=6),
  ),
  'attention_factor is not supported where': (
    'deepseek_v3', dict(rope_parameters=YARN | dict(attention_factor=2.0)),
  ),
  'partial_rotary_factor=0.5 is not supported: it must be 0.4': (
    'mistral4',
    dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.1, partial_rotary_factor=0.5)),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  config, draw = drawn_latent(kind, seed)
  if kind == 'deepseek_v2':
    config |= dict(topk_method=draw.pick('greedy', 'group_limited_greedy'))
  return config


def drawn_latent(kind: str, seed: int) -> tuple[dict[str, Any], Draw]:
  """Returns a config of a model with latent attention, and the draw."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  groups, rope = pick(1, 2, 4), draw.rope
  del config['head_dim']
  config |= dict(
    num_key_value_heads=draw.heads, q_lora_rank=pick(None, 12), kv_lora_rank=pick(8, 20),
    qk_nope_head_dim=pick(4, 10), qk_rope_head_dim=pick(4, 6), v_head_dim=pick(4, 10),
    n_routed_experts=8, num_experts_per_tok=pick(1, 2), moe_intermediate_size=pick(8, 20),
    n_shared_experts=pick(1, 2), first_k_dense_replace=pick(0, 1, draw.layers),
    routed_scaling_factor=pick(1.0, 2.5), n_group=groups, topk_group=pick(1, groups),
    norm_topk_prob=chance() if kind != 'deepseek_v2' else False,
  )  # fmt: skip
  if kind == 'mistral4' and rope['rope_type'] != 'yarn':
    rope = dict(rope_type='yarn', **draw.stretched)
  if rope['rope_type'] not in ('default', 'yarn'):
    config['rope_parameters'] = dict(rope_type='default', rope_theta=draw.theta)
  elif rope['rope_type'] == 'yarn':
    scales = dict(mscale=pick(1.0, 0.7), mscale_all_dim=pick(0.0, 1.0, 0.7))
    config['rope_parameters'] = rope | scales
    config['rope_parameters'].pop('attention_factor', None)
  if kind == 'mistral4':
    config['rope_parameters']['llama_4_scaling_beta'] = pick(0.0, 0.1, 0.9)
  return config, draw
