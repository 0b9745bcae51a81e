"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

CASES = {
  'hunyuan_v1_dense': BLOCK
  | dict(
    head_dim=10, attention_bias=True,
    rope_parameters=dict(rope_type='dynamic', rope_theta=1e4, alpha=1000.0, factor=1.0),
  ),
}  # fmt: skip
