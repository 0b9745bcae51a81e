"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, Draw

_GEMMA4 = dict(
  head_dim=10, global_head_dim=12, sliding_window=5, hidden_size_per_layer_input=0,
  rope_parameters={
    'full_attention': dict(rope_type='proportional', rope_theta=1e3, partial_rotary_factor=0.5),
    'sliding_attention': dict(rope_type='default', rope_theta=1e2),
  },
)  # fmt: skip

CASES = {
  'gemma4_text': BLOCK
  | _GEMMA4
  | dict(
    num_hidden_layers=6, num_global_key_value_heads=1, attention_k_eq_v=True,
    final_logit_softcapping=3.0, layer_types=['sliding_attention', 'full_attention'] * 3,
  ),
  'gemma4_text experts': BLOCK
  | _GEMMA4
  | dict(
    layer_types=['sliding_attention'] * 3 + ['full_attention'], enable_moe_block=True,
    num_experts=8, top_k_experts=3, moe_intermediate_size=24, tie_word_embeddings=False,
  ),
  'gemma4_text linked': BLOCK
  | _GEMMA4
  | dict(
    num_hidden_layers=6, num_kv_shared_layers=3, use_double_wide_mlp=True,
    # of 6 numbers, a norm may be almost 0, and what is rounded is then seen in the logits
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
    layer_types=['sliding_attention', 'full_attention'] * 3,
  ),
}  # fmt: skip
_FOUR = dict(num_hidden_layers=4, layer_types=['sliding_attention', 'full_attention'] * 2)
ON_MESHES: dict[str, dict[str, Any]] = {
  'gemma4_text': _FOUR,
  'gemma4_text experts': {},
  # of 6 instead of 32 dimensions, all may be near 0, and then the norm behind them divides by next
  # to nothing: an ulp of the weights changes gradients by 1e-3
  'gemma4_text linked': _FOUR | dict(num_kv_shared_layers=2, hidden_size_per_layer_input=32),
}
# Gemma 4 does not divide scores by the root of the head's size: with two ulps more or less in each
# parameter, gradients on one device change by up to 2.3e-5, as they do with experts.
TOLERANCES = {'gemma4_text': 3e-5, 'gemma4_text experts': 3e-5}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  "attention_k_eq_v='false' must be": ('gemma4_text', dict(attention_k_eq_v='false')),
  "enable_moe_block='false' must be": ('gemma4_text', dict(enable_moe_block='false')),
  'per_layer_config=.1., .*: no model': ('gemma4_text', dict(per_layer_config=[1])),
  'layer_types=5: no model|layer_types=5, sliding_window': ('gemma4_text', dict(layer_types=5)),
  'rope_parameters=.*: no model': (
    'gemma4_text', dict(rope_parameters=dict(full_attention=3)),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed)
  config, pick, chance = draw.block(chooses_activation=False), draw.pick, draw.chance
  local = dict(rope_type='default', rope_theta=pick(100.0, 1e4))
  share = pick(1.0, 0.5, 0.25)
  proportional = dict(rope_type='proportional', rope_theta=1e3, partial_rotary_factor=share)
  config |= dict(
    sliding_window=draw.window, layer_types=[*draw.types[:-1], 'full_attention'],
    global_head_dim=pick(8, 12, 20), attention_k_eq_v=chance(), hidden_size_per_layer_input=0,
    num_global_key_value_heads=pick(None, *(n for n in (1, 2, 3) if draw.heads % n == 0)),
    hidden_activation=pick('gelu_pytorch_tanh', 'silu'),
    final_logit_softcapping=pick(None, 2.0, 30.0), use_bidirectional_attention=pick(None, 'vision'),
    rope_parameters={
      'full_attention': pick(proportional, proportional, draw.rope), 'sliding_attention': local,
    },
  )  # fmt: skip
  if chance():
    config |= dict(
      enable_moe_block=True, num_experts=8, top_k_experts=pick(1, 3),
      moe_intermediate_size=pick(8, 20),
    )  # fmt: skip
  if chance():  # transformers cannot compute layers that share keys without inputs of layers
    given = config['layer_types']
    # the layers that have keys have all kinds of attention
    most = max(n for n in range(len(given)) if {*given[: len(given) - n]} == {*given})
    config |= dict(
      hidden_size_per_layer_input=pick(10, 16), num_kv_shared_layers=pick(0, min(most, 1), most),
      vocab_size_per_layer_input=config['vocab_size'] + pick(0, 5), use_double_wide_mlp=chance(),
    )  # fmt: skip
  return config
