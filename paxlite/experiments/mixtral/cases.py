"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, Draw

CASES = {
  'mixtral': BLOCK | EXPERTS | dict(sliding_window=9),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(), draw.pick
  config['sliding_window'] = pick(None, draw.window)
  config |= dict(num_experts_per_tok=pick(1, 2, 3), num_local_experts=pick(4, 6))
  return config
