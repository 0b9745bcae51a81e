"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

CASES = {
  'seed_oss': BLOCK
  | dict(head_dim=10, attention_bias=True, attention_out_bias=True, mlp_bias=True),
}  # fmt: skip
