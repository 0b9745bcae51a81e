"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

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
# one layer of each kind, and a limit that no token reaches: where one is on the limit itself,
# rounding decides whether its gradient is 0
_KINDS = 'sliding', 'heavily_compressed', 'compressed_sparse'
ON_MESHES: dict[str, dict[str, Any]] = {
  'deepseek_v4': dict(
    num_hidden_layers=3, layer_types=[f'{kind}_attention' for kind in _KINDS], swiglu_limit=10.0
  )
}
# Scales and biases of hyper-connections are few numbers, each with a gradient that adds up terms of
# all tokens and streams. Most of these cancel: on one device, rows in another order change some of
# these gradients by 6e-6 of the largest.
TOLERANCES = {'deepseek_v4': 3e-5}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'mlp_layer_types=.* hash_moe first': (
    'deepseek_v4', dict(mlp_layer_types=['moe', *['hash_moe'] * 5]),
  ),
  'layer_types must have 6 of sliding_attention, compressed': (
    'deepseek_v4', dict(layer_types=['full_attention'] * 6),
  ),
  'compress_ratios has 8: only 0, 4 and 128': (
    'deepseek_v4', dict(layer_types=None, compress_ratios=[8] * 6),
  ),
  'compress_rates=.* must have': ('deepseek_v4', dict(compress_rates={'other_attention': 3})),
  "scoring_func='sigmoid'": ('deepseek_v4', dict(scoring_func='sigmoid')),
  'norm_topk_prob=False': ('deepseek_v4', dict(norm_topk_prob=False)),
  'n_shared_experts=2': ('deepseek_v4', dict(n_shared_experts=2)),
  'num_key_value_heads=2': ('deepseek_v4', dict(num_key_value_heads=2)),
  'of main is not supported': ('deepseek_v4', dict(rope_parameters=dict(
    main=dict(rope_type='linear', rope_theta=1e4, factor=2.0),
    compress=dict(rope_type='default', rope_theta=1e4),
  ))),
  'partial_rotary_factor=0.25 of main must': ('deepseek_v4', dict(rope_parameters=dict(
    main=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.25),
    compress=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.5),
  ))),
  'NUM_HEADS=4 is not divisible by OUTPUT_GROUPS=3': ('deepseek_v4', dict(o_groups=3)),
  'SWIGLU_LIMIT=0 must be positive': ('deepseek_v4', dict(swiglu_limit=0.0)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  layers, width, rope = pick(1, 2, 3, 4, 6), pick(8, 12, 16), draw.rope
  kinds = 'sliding_attention', 'compressed_sparse_attention', 'heavily_compressed_attention'
  del config['intermediate_size']
  config |= dict(
    num_hidden_layers=layers, num_key_value_heads=1, head_dim=width, q_lora_rank=pick(8, 12),
    moe_intermediate_size=pick(8, 20), n_routed_experts=8, num_experts_per_tok=pick(1, 2, 3),
    routed_scaling_factor=pick(1.0, 2.5), partial_rotary_factor=pick(0.5, 1.0),
    layer_types=pick(None, [pick(*kinds) for _ in range(layers)]),
    compress_rates=pick(None, dict(zip(kinds[1:], (pick(2, 3, 4), pick(1, 5, 7)), strict=True))),
    num_hash_layers=pick(0, 1, 3), hc_mult=pick(1, 2, 4), hc_sinkhorn_iters=pick(1, 3, 20),
    hc_eps=pick(1e-6, 1e-2), sliding_window=pick(3, 7, 30), swiglu_limit=pick(0.3, 10.0),
    o_groups=pick(*(n for n in (1, 2, 3) if draw.heads % n == 0)), o_lora_rank=pick(4, 10),
    index_n_heads=24, index_head_dim=pick(16, 20), index_topk=pick(1, 2, 4, 30),
    rope_theta=rope['rope_theta'], compress_rope_theta=pick(100.0, 1e4),
  )  # fmt: skip
  if config['num_hash_layers'] == 0:
    config['mlp_layer_types'] = ['moe'] * layers
  if chance():
    share = dict(partial_rotary_factor=config['partial_rotary_factor'])
    main = dict(rope_type='default', rope_theta=pick(50.0, 1e4), **share)
    config['rope_parameters'] = dict(main=main, compress=rope | share)
  else:
    del rope['rope_theta']
  return config
