"""Shared by test cases of families: parts of config.json of tiny models.

A family's module `cases` has CASES, in which every option of the family is used and can be seen in
the result; the first word of a case is its model_type. Its function `drawn` returns a config of a
model_type with random sizes and options. ON_MESHES has the cases that are trained on a mesh of 8
devices, with what differs there from the case; with experts the axis expert is one of the mesh,
without them, and for OVER_CONTEXT, the axis context. TOLERANCES has the largest relative difference
of their gradients from those on one device where it is above 1e-5. REFUSED has cases with values
that an import refuses. published.json has what config.json says of published models, apart from
keys that every file has, by the names of their classes.
"""

import zlib
from typing import Any

import numpy as np

BLOCK = dict(
  vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=4, num_attention_heads=4,
  num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
  pad_token_id=0,
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
  beta_fast=4.0, beta_slow=1.0,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=8)
DELTA = dict(
  head_dim=16, linear_key_head_dim=12, linear_value_head_dim=10, linear_num_key_heads=2,
  linear_num_value_heads=4, linear_conv_kernel_dim=3,
  layer_types=['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
)  # fmt: skip


class Draw:
  """Random sizes and options of a tiny model.

  Args:
    kind: The model_type. Each draws other numbers.
    seed: Of the draw.
    widths: Sizes of a head to choose from.
    spans: Whether the heads span the model: their size is none of the config.

  Attributes:
    pick: Returns one of its arguments.
    chance: Returns whether an option is on.
    heads, layers, width, hidden: Numbers of heads and layers, sizes of a head and of the model.
    config: The config; `block` fills it.
    theta, rope, stretched: What `block` draws of rotary positions: the base, all of them, and what
      the scaled ones have in common.
    window, types: What `block` draws of windows: a size, and the kind of attention of each layer.
  """

  config: dict[str, Any]
  theta: float
  rope: dict[str, Any]
  stretched: dict[str, Any]
  window: int
  types: list[str]

  def __init__(
    self, kind: str, seed: int, widths: tuple[int, ...] = (4, 6, 10, 16), spans: bool = False
  ):
    self.rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    self.heads = self.pick(2, 4, 6)
    self.kv_heads = self.pick(*(n for n in (1, 2, 3, 4, 6) if self.heads % n == 0))
    self.width, self.layers = self.pick(*widths), self.pick(1, 2, 3, 4)
    self.spans = spans
    self.hidden = self.heads * (self.width if spans else self.pick(4, 8, 12))

  def pick(self, *options: Any) -> Any:
    return options[self.rng.integers(len(options))]

  def chance(self) -> bool:
    return bool(self.rng.integers(2))

  def block(self, chooses_activation: bool = True) -> dict[str, Any]:
    """Draws what most families have; returns the config."""
    pick = self.pick
    self.config = config = dict(
      vocab_size=pick(50, 61, 96), hidden_size=self.hidden, intermediate_size=pick(12, 24, 56),
      num_hidden_layers=self.layers, num_attention_heads=self.heads,
      num_key_value_heads=self.kv_heads, max_position_embeddings=64,
      tie_word_embeddings=self.chance(), rms_norm_eps=pick(1e-6, 1e-5, 1e-3),
      bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    if not self.spans:
      config['head_dim'] = self.width
    if chooses_activation:
      config['hidden_act'] = pick('silu', 'silu', 'gelu', 'gelu_pytorch_tanh', 'relu')
    self.theta = theta = pick(100.0, 1e4, 5e5)
    self.stretched = dict(
      rope_theta=theta, factor=pick(2.0, 8.0), original_max_position_embeddings=8
    )
    stretched = self.stretched
    self.rope = config['rope_parameters'] = pick(
      dict(rope_type='default', rope_theta=theta),
      dict(rope_type='linear', rope_theta=theta, factor=pick(2.0, 4.0)),
      dict(rope_type='llama3', low_freq_factor=1.0, high_freq_factor=4.0, **stretched),
      dict(rope_type='yarn', beta_fast=pick(32.0, 2.0), truncate=self.chance(), **stretched),
      dict(rope_type='yarn', attention_factor=pick(0.7, 1.0), **stretched | dict(factor=1.0)),
    )  # fmt: skip
    self.window = pick(3, 7, 30)
    self.types = [pick('sliding_attention', 'full_attention') for _ in range(self.layers)]
    return config

  def partial_rope(self) -> dict[str, Any]:
    """Returns the rotary positions, of a part of each head."""
    share = self.pick(*(share for share in (1.0, 0.5, 0.25) if self.width * share % 2 == 0))
    return self.rope | dict(partial_rotary_factor=share)


def drawn_delta(draw: Draw) -> dict[str, Any]:
  """Returns the keys of layers with the delta rule."""
  pick, key_heads = draw.pick, draw.pick(1, 2, 3)
  return dict(
    linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * pick(1, 2, 3),
    linear_key_head_dim=pick(4, 6, 16), linear_value_head_dim=pick(4, 10, 16),
    linear_conv_kernel_dim=pick(2, 3, 4),
    layer_types=[pick('linear_attention', 'linear_attention', 'full_attention')
                 for _ in range(draw.layers - 1)] + ['full_attention'],
  )  # fmt: skip
