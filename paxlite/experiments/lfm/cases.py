"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

CASES = {
  'lfm2': BLOCK
  | dict(
    conv_bias=True, conv_L_cache=3, block_multiple_of=12, block_ffn_dim_multiplier=1.5,
    layer_types=['conv', 'full_attention', 'conv', 'conv'],
  ),
  'lfm2 untied': BLOCK
  | dict(
    conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False, full_attn_idxs=[1, 3]
  ),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'lfm2': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'use_pos_enc=False': ('lfm2', dict(use_pos_enc=False)),
  'conv_dim=16 is not supported: it must be hidden_size=32': ('lfm2', dict(conv_dim=16)),
  'layer_types must have 4 of conv': ('lfm2', dict(layer_types=['conv'] * 3)),
  "conv_bias='true' must be": ('lfm2', dict(conv_bias='true')),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  del config['head_dim'], config['hidden_act']
  config |= dict(
    hidden_size=draw.heads * draw.width, norm_eps=config.pop('rms_norm_eps'), conv_bias=chance(),
    conv_L_cache=pick(1, 2, 3, 5), block_auto_adjust_ff_dim=chance(),
    block_ffn_dim_multiplier=pick(1, 0.7, 1.5), block_multiple_of=pick(4, 10),
    layer_types=[pick('conv', 'conv', 'full_attention') for _ in range(draw.layers - 1)]
    + ['full_attention'],  # transformers computes none without
  )  # fmt: skip
  return config
