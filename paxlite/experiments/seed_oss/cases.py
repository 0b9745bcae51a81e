"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

CASES = {
  'seed_oss': BLOCK
  | dict(head_dim=10, attention_bias=True, attention_out_bias=True, mlp_bias=True),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, chance = draw.block(), draw.chance
  config |= dict(attention_bias=chance(), attention_out_bias=chance(), mlp_bias=chance())
  return config
