"""Attention that hands its keys and values to later blocks, and attention that reads them.

Both are called with (x, positions, segments, keys of an earlier block), and return what they
compute and their own keys. See layers.linked_stack, whose blocks they belong to.
"""

from typing import NamedTuple

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import Attention
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import shard


class Keys(NamedTuple):
  """The keys and values that a block attends to, after their norms and rotations.

  Attributes:
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, H].
    start_B: The slot of the first query of each row, [B], where a cache has keys before it; None: a
      query has the slot of its own key.
  """

  key: jax.Array
  value: jax.Array
  start_B: jax.Array | None

  @property
  def start(self) -> jax.Array | int:
    return 0 if self.start_B is None else self.start_B


class GivingAttention(Attention):
  """Attention that also returns its keys; it ignores those of other blocks."""

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    keys: Keys | None,
  ) -> tuple[jax.Array, Keys | None]:
    query, key, value, start = self.heads(x_BTD, positions_BT)
    out_BTD = self.attended(x_BTD, query, key, value, positions_BT, segment_ids_BT, start)
    return out_BTD, Keys(key, value, None if isinstance(start, int) else start)


class ReadingAttention(Attention):
  """Attention that reads the keys and values of an earlier block, and has queries alone.

  It has no cache: that of the earlier block is the only copy of the keys.

  Attributes:
    qkv_tpl: Computes queries, as QueryProjection. There are no norms and no rotations but theirs.
  """

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    keys: Keys | None,
  ) -> tuple[jax.Array, Keys | None]:
    assert keys is not None
    query = self.qkv_tpl(name='qkv')(x_BTD)
    if self.qk_norm_tpl is not None:
      query = self.qk_norm_tpl(name='query_norm')(query)
    if self.rotary_tpl is not None:
      query = self.rotary_tpl(name='rotary')(query, positions_BT)
    if self.rotated_norm_tpl is not None:
      query = self.rotated_norm_tpl(name='query_norm')(query)
    if self.qk_norm_tpl is None and self.rotated_norm_tpl is None:
      query = checkpoint_name(query, 'attention_input')
    if self.query_scale_tpl is not None:
      query = self.query_scale_tpl(name='per_dim_scale')(query)
    if self.position_scale_tpl is not None:
      query = self.position_scale_tpl(name='position_scale')(query, positions_BT)
    out_BTD = self.attended(
      x_BTD, query, keys.key, keys.value, positions_BT, segment_ids_BT, keys.start
    )
    return out_BTD, None


class QueryProjection(nn.Module):
  """Queries alone, [B, T, D] to [B, T, N, H], in the place of SeparateQkv."""

  model_dims: int
  num_heads: int
  head_dim: int
  query_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    query = self.query_tpl(
      equation='BTD,DNH->BTNH',
      shape=(self.model_dims, self.num_heads, self.head_dim),
      axes=('embed', 'heads', 'head_dim'),
      name='query',
    )(x_BTD)
    return shard(checkpoint_name(query, 'query_proj'), 'batch', 'length', 'act_heads', None)
