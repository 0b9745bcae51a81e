"""Draws of tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import Draw

CASES: dict[str, dict[str, Any]] = {}


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed, spans=True)
  return dict(
    vocab_size=60, n_embd=draw.hidden, n_head=draw.heads, n_layer=draw.layers, n_positions=40,
    n_inner=draw.pick(None, 24), activation_function=draw.pick('gelu_new', 'relu'),
  )  # fmt: skip
