"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

CASES = {
  'exaone4': BLOCK
  | dict(
    head_dim=10, num_hidden_layers=5, sliding_window=5, sliding_window_pattern=2,
    rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=4.0),
  ),
  'exaone4 full': BLOCK
  | dict(sliding_window=None, sliding_window_pattern=None, layer_types=['full_attention'] * 4),
}  # fmt: skip
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'layer_types with sliding_attention needs': ('exaone4', dict(sliding_window=None)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, chance = draw.block(), draw.chance
  config |= dict(sliding_window=draw.window, layer_types=draw.types)
  if chance():
    full = ['full_attention'] * draw.layers
    config |= dict(sliding_window=None, sliding_window_pattern=None, layer_types=full)
  return config
