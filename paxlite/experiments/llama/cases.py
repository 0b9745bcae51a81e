"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, YARN, Draw

CASES = {
  'llama yarn': BLOCK | dict(head_dim=10, rope_parameters=YARN),
  'mistral wide heads': BLOCK | dict(head_dim=18, sliding_window=7),
  'smollm3': BLOCK | dict(num_hidden_layers=5, no_rope_layer_interval=2),
  'smollm3 windows': BLOCK
  | dict(num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed, spans=kind == 'smollm3')
  config, pick, chance = draw.block(), draw.pick, draw.chance
  if kind == 'mistral':
    config['sliding_window'] = pick(None, draw.window)
  if kind == 'smollm3':
    config['no_rope_layers'] = [int(chance()) for _ in range(draw.layers)]
    config |= pick({}, dict(use_sliding_window=True, sliding_window=draw.window))
    config |= pick({}, dict(sliding_window=draw.window, layer_types=draw.types))
  return config
