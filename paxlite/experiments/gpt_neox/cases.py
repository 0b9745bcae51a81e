"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

_NEOX = {k: v for k, v in BLOCK.items() if k != 'num_key_value_heads'} | dict(
  layer_norm_eps=1e-3, rotary_pct=0.5
)

CASES = {
  'gpt_neox': _NEOX,
  'gpt_neox in turn': _NEOX | dict(use_parallel_residual=False, attention_bias=False),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'gpt_neox': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'head_dim=8 is not supported': ('gpt_neox', dict(head_dim=8)),
  'use_parallel_residual=1 must be true or false': ('gpt_neox', dict(use_parallel_residual=1)),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed, spans=True)
  config = draw.block()
  config['rope_parameters'] = draw.partial_rope()
  config['attention_bias'] = draw.chance()
  config['layer_norm_eps'] = config.pop('rms_norm_eps')
  del config['num_key_value_heads']
  config['use_parallel_residual'] = draw.chance()
  return config
