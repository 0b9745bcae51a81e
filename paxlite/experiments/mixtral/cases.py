"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, EXPERTS

CASES = {
  'mixtral': BLOCK | EXPERTS | dict(sliding_window=9),
}  # fmt: skip
