"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, DELTA, YARN, Draw, drawn_delta

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
ON_MESHES: dict[str, dict[str, Any]] = {'olmo2': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "linear_allow_neg_eigval='no' must be": ('olmo_hybrid', dict(linear_allow_neg_eigval='no')),
  'full_attention_interval=0 must be': (
    'olmo_hybrid', dict(layer_types=None, full_attention_interval=0),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  widths = (4, 8, 16) if kind == 'olmoe' else (4, 6, 10, 16)  # its product of experts needs them
  draw = Draw(kind, seed, widths, spans=kind in ('olmo2', 'olmoe'))
  config, pick, chance = draw.block(), draw.pick, draw.chance
  if kind == 'olmo3':
    config |= dict(sliding_window=draw.window, layer_types=draw.types)
    local = dict(rope_type='default', rope_theta=pick(100.0, 1e4))
    config['rope_parameters'] = {'full_attention': draw.rope, 'sliding_attention': local}
  if kind == 'olmoe':
    config |= dict(
      num_experts_per_tok=pick(1, 2, 3), num_experts=pick(4, 6), norm_topk_prob=chance()
    )
  if kind == 'olmo_hybrid':
    del config['head_dim']
    config['rope_parameters'] = pick(draw.rope, dict(rope_type='default', rope_theta=None))
    config |= drawn_delta(draw)
    config['layer_types'] = ['linear_attention', *config['layer_types']]
    config |= dict(num_hidden_layers=draw.layers + 1, linear_allow_neg_eigval=chance())
    # transformers saves convolutions in three parts of one size, whatever their sizes are
    shares = config['linear_num_value_heads'] // config['linear_num_key_heads']
    config['linear_key_head_dim'] = config['linear_value_head_dim'] * shares
  return config
