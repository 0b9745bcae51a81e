"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

CASES = {
  'exaone4': BLOCK
  | dict(
    head_dim=10, num_hidden_layers=5, sliding_window=5, sliding_window_pattern=2,
    rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=4.0),
  ),
  'exaone4 full': BLOCK
  | dict(sliding_window=None, sliding_window_pattern=None, layer_types=['full_attention'] * 4),
}  # fmt: skip
