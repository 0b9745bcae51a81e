"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

_LLAMA4 = dict(
  head_dim=10, intermediate_size_mlp=40, num_local_experts=8, attention_chunk_size=7,
  floor_scale=5, attn_scale=0.7, rope_parameters=dict(rope_type='default', rope_theta=1e2),
)  # fmt: skip

CASES = {
  'llama4_text': BLOCK
  | _LLAMA4
  | dict(num_hidden_layers=6, num_experts_per_tok=2, interleave_moe_layer_step=2),
  'llama4_text experts': BLOCK
  | _LLAMA4
  | dict(
    num_experts_per_tok=1, use_qk_norm=False, attention_bias=True, no_rope_layers=[1] * 4,
    rope_parameters=dict(
      rope_type='llama3', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
      low_freq_factor=1.0, high_freq_factor=1.0,
    ),
  ),
}  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {'llama4_text': {}, 'llama4_text experts': {}}
OVER_CONTEXT = 'llama4_text'  # its chunks, too, and not only its experts
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "attn_temperature_tuning='false' must be": (
    'llama4_text', dict(attn_temperature_tuning='false'),
  ),
  'no_rope_layer_interval=0 must be an': (
    'llama4_text', dict(no_rope_layers=None, no_rope_layer_interval=0),
  ),
  'interleave_moe_layer_step=0 must': (
    'llama4_text', dict(moe_layers=None, interleave_moe_layer_step=0),
  ),
  'attn_scale=None: no model': ('llama4_text', dict(attn_scale=None)),
  'moe_layers=.1.5.': ('llama4_text', dict(moe_layers=[1.5])),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  every = pick(1, 2, 3)
  config |= dict(
    intermediate_size_mlp=pick(12, 40), num_local_experts=pick(4, 6),
    num_experts_per_tok=pick(1, 1, 3), interleave_moe_layer_step=every,
    no_rope_layers=[int(chance()) for _ in range(draw.layers)], use_qk_norm=chance(),
    attention_chunk_size=pick(3, 8, 30), attn_temperature_tuning=chance(), floor_scale=pick(3, 8),
    attn_scale=pick(0.1, 0.9), attention_bias=chance(),
  )  # fmt: skip
  return config
