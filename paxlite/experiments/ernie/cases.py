"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

CASES = {
  'ernie4_5': BLOCK | dict(head_dim=10, use_bias=True, tie_word_embeddings=False),
  'ernie4_5_moe': BLOCK
  | dict(
    num_hidden_layers=6, use_bias=True, tie_word_embeddings=False, moe_num_experts=8, moe_k=3,
    moe_num_shared_experts=2, moe_intermediate_size=24, moe_layer_start_index=2,
    moe_layer_interval=2,
  ),
}  # fmt: skip
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  'moe_layer_end_index=4 before': ('ernie4_5_moe', dict(moe_layer_end_index=4)),
  "moe_gate='x'": ('ernie4_5_moe', dict(moe_gate='x')),
  "use_bias='false' must be true or false": ('ernie4_5_moe', dict(use_bias='false')),
  'moe_layer_interval=0 must be an integer of at least 1': (
    'ernie4_5_moe', dict(moe_layer_interval=0),
  ),
  "moe_layer_start_index='x' must be an integer": (
    'ernie4_5_moe', dict(moe_layer_start_index='x'),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(), draw.pick, draw.chance
  config['use_bias'] = chance()
  if kind == 'ernie4_5_moe':
    config |= dict(
      moe_num_experts=pick(4, 8), moe_k=pick(1, 3), moe_layer_interval=pick(1, 2),
      moe_num_shared_experts=pick(0, 1, 2), moe_intermediate_size=pick(8, 20),
      moe_layer_start_index=pick(0, 1, draw.layers), moe_layer_end_index=-1,
    )  # fmt: skip
  return config
