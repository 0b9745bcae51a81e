"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

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
# two layers of each kind: the pattern of Gemma 3 has six, and with a remainder eight
ON_MESHES: dict[str, dict[str, Any]] = {
  'gemma3_text': dict(num_hidden_layers=4, layer_types=['sliding_attention', 'full_attention'] * 2)
}


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick = draw.block(chooses_activation=False), draw.pick
  if kind != 'gemma':
    config |= dict(sliding_window=draw.window, layer_types=draw.types)
    config |= dict(
      query_pre_attn_scalar=pick(4, 9, 256), final_logit_softcapping=pick(None, 2.0, 30.0)
    )
  if kind == 'gemma2':
    config['attn_logit_softcapping'] = pick(None, 1.5, 50.0)
  if kind == 'gemma3_text':
    local = dict(rope_type='default', rope_theta=pick(100.0, 1e4))
    config['rope_parameters'] = {'full_attention': draw.rope, 'sliding_attention': local}
  return config
