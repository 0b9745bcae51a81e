"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, YARN

CASES = {
  'ministral3': BLOCK
  | dict(head_dim=10, sliding_window=19, rope_parameters=YARN | dict(llama_4_scaling_beta=0.7)),
}  # fmt: skip
