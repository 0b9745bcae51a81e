"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

CASES = {
  'hunyuan_v1_dense': BLOCK
  | dict(
    head_dim=10, attention_bias=True,
    rope_parameters=dict(rope_type='dynamic', rope_theta=1e4, alpha=1000.0, factor=1.0),
  ),
}  # fmt: skip
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'mscale=2.0 of rope_type dynamic is not supported': (
    'hunyuan_v1_dense', dict(rope_parameters=dict(rope_type='dynamic', factor=2.0, mscale=2.0)),
  ),
  'use_cla=True': ('hunyuan_v1_dense', dict(use_cla=True)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, chance = draw.block(), draw.chance
  config['attention_bias'] = chance()
  if chance():
    config['rope_parameters'] = dict(
      rope_type='dynamic', rope_theta=draw.theta, factor=1.0, alpha=9.0
    )
  return config
