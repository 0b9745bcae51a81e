"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, YARN

CASES = {
  'llama yarn': BLOCK | dict(head_dim=10, rope_parameters=YARN),
  'mistral wide heads': BLOCK | dict(head_dim=18, sliding_window=7),
  'smollm3': BLOCK | dict(num_hidden_layers=5, no_rope_layer_interval=2),
  'smollm3 windows': BLOCK
  | dict(num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7),
}  # fmt: skip
