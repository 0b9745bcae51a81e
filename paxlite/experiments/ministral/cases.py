"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, YARN, Draw

CASES = {
  'ministral3': BLOCK
  | dict(head_dim=10, sliding_window=19, rope_parameters=YARN | dict(llama_4_scaling_beta=0.7)),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'ministral3': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'llama_4_scaling_beta is implemented for rope_type yarn': (
    'ministral3',
    dict(rope_parameters=dict(rope_type='linear', factor=2.0, llama_4_scaling_beta=0.1)),
  ),
  'has no llama_4_scaling_beta': ('ministral3', dict(rope_parameters=YARN)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(), draw.pick
  config['sliding_window'] = pick(None, draw.window)
  rope = draw.rope
  if rope['rope_type'] not in ('llama3', 'yarn'):
    rope = dict(rope_type='yarn', **draw.stretched)
  config['rope_parameters'] = rope | dict(llama_4_scaling_beta=pick(0.0, 0.1, 0.9))
  config['rope_parameters'].setdefault('original_max_position_embeddings', 8)
  return config
