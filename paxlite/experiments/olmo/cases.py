"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, DELTA, YARN

# transformers saves convolutions in three parts of one size, whatever their sizes are
_OLMO_DELTA = {k: v for k, v in DELTA.items() if k != 'head_dim'} | dict(linear_key_head_dim=20)

CASES = {
  'olmo2': BLOCK,
  'olmo3': BLOCK
  | dict(
    sliding_window=5, num_hidden_layers=5,
    rope_parameters={
      'full_attention': YARN,
      'sliding_attention': dict(rope_type='default', rope_theta=1e4),
    },
  ),
  'olmoe': BLOCK | dict(num_experts=8, num_experts_per_tok=3),
  'olmo_hybrid': BLOCK
  | _OLMO_DELTA
  | dict(rope_parameters=dict(rope_type='default', rope_theta=None)),
  'olmo_hybrid positions': BLOCK
  | _OLMO_DELTA
  | dict(rope_parameters=YARN, linear_allow_neg_eigval=False),
}  # fmt: skip
