"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, DELTA, Draw, drawn_delta

_SHARED = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
              shared_expert_intermediate_size=20)  # fmt: skip

CASES = {
  'qwen3_5_text': BLOCK | DELTA,
  'qwen3_5_moe_text': BLOCK | DELTA | _SHARED,
  'qwen3_next': BLOCK | DELTA | _SHARED | dict(norm_topk_prob=False),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'qwen3_5_text': {}, 'qwen3_next': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "full_attention_interval='x' must be an integer of at least 1": (
    'qwen3_5_text', dict(layer_types=None, full_attention_interval='x'),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  config |= drawn_delta(draw)
  config['head_dim'] = pick(8, 16)
  config['rope_parameters'] |= dict(partial_rotary_factor=pick(0.25, 0.5, 1.0))
  if kind != 'qwen3_5_text':
    config |= dict(
      num_experts_per_tok=pick(1, 2, 3), num_experts=pick(4, 6), moe_intermediate_size=pick(8, 20),
      shared_expert_intermediate_size=pick(8, 12),
    )  # fmt: skip
  if kind == 'qwen3_next':
    config |= dict(norm_topk_prob=chance())
  return config
