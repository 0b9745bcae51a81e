"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN, Draw

CASES = {
  'gpt_oss': BLOCK
  | EXPERTS
  | dict(head_dim=10, sliding_window=5, rope_parameters=YARN | dict(truncate=False)),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'gpt_oss': {}}


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(chooses_activation=False), draw.pick
  config |= dict(sliding_window=draw.window, layer_types=draw.types)
  config |= dict(num_experts_per_tok=pick(1, 2, 3), num_local_experts=pick(4, 6))
  return config
