"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, Draw

CASES = {
  'qwen2': BLOCK,
  'qwen2 window': BLOCK
  | dict(use_sliding_window=True, sliding_window=6, max_window_layers=2, tie_word_embeddings=True),
  'qwen3': BLOCK | dict(head_dim=10),
  'qwen3_moe': BLOCK | EXPERTS | dict(head_dim=10, moe_intermediate_size=24, norm_topk_prob=True),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'qwen2 window': {}, 'qwen3_moe': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "use_sliding_window='false' must be": ('qwen2', dict(use_sliding_window='false')),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed, spans=kind == 'qwen2')
  config, pick, chance = draw.block(), draw.pick, draw.chance
  if kind == 'qwen3_moe':
    config |= dict(
      num_experts_per_tok=pick(1, 2, 3), num_local_experts=pick(4, 6),
      moe_intermediate_size=pick(8, 20), norm_topk_prob=chance(),
    )  # fmt: skip
  else:
    config |= dict(use_sliding_window=chance(), sliding_window=draw.window, layer_types=draw.types)
    if not config['use_sliding_window']:
      config |= dict(sliding_window=None, layer_types=['full_attention'] * draw.layers)
  return config
