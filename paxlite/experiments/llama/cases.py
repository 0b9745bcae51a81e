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
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "rope_type 'proportional' is not supported": (
    'llama yarn', dict(rope_parameters=dict(rope_type='proportional', factor=2.0)),
  ),
  "factor='x' must be a number above 0": (
    'llama yarn', dict(rope_parameters=dict(rope_type='dynamic', factor='x')),
  ),
  "tie_word_embeddings='false' must be": ('llama', dict(tie_word_embeddings='false')),
  'no_rope_layer_interval=0 must be': ('smollm3', dict(no_rope_layer_interval=0)),
  'layer_types with sliding_attention and sliding_window=None': (
    'smollm3', dict(layer_types=['sliding_attention'] * 5),
  ),
  'num_hidden_layers=1000000000 must be from 0 to 2,000': (
    'llama yarn', dict(num_hidden_layers=10**9),
  ),
  'ROPE_BETA_FAST=0': ('llama yarn', dict(rope_parameters=YARN | dict(beta_fast=0.0))),
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
