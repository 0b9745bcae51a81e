"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

_NEOX = {k: v for k, v in BLOCK.items() if k != 'num_key_value_heads'} | dict(
  layer_norm_eps=1e-3, rotary_pct=0.5
)

CASES = {
  'gpt_neox': _NEOX,
  'gpt_neox in turn': _NEOX | dict(use_parallel_residual=False, attention_bias=False),
}  # fmt: skip
