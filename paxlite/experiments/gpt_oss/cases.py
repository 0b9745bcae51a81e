"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, EXPERTS, YARN

CASES = {
  'gpt_oss': BLOCK
  | EXPERTS
  | dict(head_dim=10, sliding_window=5, rope_parameters=YARN | dict(truncate=False)),
}  # fmt: skip
