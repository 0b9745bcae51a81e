"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN

CASES = {
  'minimax_m2': BLOCK
  | EXPERTS
  | dict(head_dim=12, rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
}  # fmt: skip
