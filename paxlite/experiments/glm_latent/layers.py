"""Latent attention that hands its choice of keys to later blocks, and one that takes it over.

Both are called with (x, positions, segments, choice of an earlier block), and return what they
compute and their choice, a bias of the scores [B, 1, T, S] or None for all keys. See
layers.linked_stack, whose blocks they belong to. Each has latents and a cache of its own.
"""

import jax
from flax import linen as nn

from paxlite.experiments.deepseek.layers import LatentAttention

Choice = jax.Array | None


class IndexSourceAttention(LatentAttention):
  """LatentAttention that also returns its choice; it ignores those of other blocks."""

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    choice_B1TS: Choice,
  ) -> tuple[jax.Array, Choice]:
    select = lambda latent_BTQ: self.selected(x_BTD, latent_BTQ, positions_BT, segment_ids_BT)
    return self.attended(x_BTD, positions_BT, segment_ids_BT, select)


class IndexSharedAttention(LatentAttention):
  """LatentAttention whose queries see the keys that an earlier block has chosen."""

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    choice_B1TS: Choice,
  ) -> tuple[jax.Array, Choice]:
    return self.attended(x_BTD, positions_BT, segment_ids_BT, lambda _: choice_B1TS)
