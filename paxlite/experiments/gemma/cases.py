"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

CASES = {
  'gemma2': BLOCK
  | dict(
    head_dim=10, sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
  ),
  'gemma3_text': BLOCK
  | dict(
    num_hidden_layers=8, head_dim=10, sliding_window=5, query_pre_attn_scalar=7,
    rope_parameters={
      'full_attention': dict(rope_type='linear', rope_theta=1e6, factor=4.0),
      'sliding_attention': dict(rope_type='default', rope_theta=1e4),
    },
  ),
}  # fmt: skip
