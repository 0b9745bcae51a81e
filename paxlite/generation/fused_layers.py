"""Fused projections: one product of an input with several frozen weights.

A product of few rows takes as long as its weight takes to be read. A weight [D, …] whose product
sums over D is read at the full bandwidth of the memory. Several small weights are not. XLA first
copies a weight whose summed dimension is not the first, as that of CombinedQkv, [3, D, N, H].
"""

import math
from collections.abc import Sequence

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.feedforward import GatedFeedForward
from paxlite.layers.projection import Projection
from paxlite.layers.remat import recomputed
from paxlite.parallel.partitioning import shard

FUSED = 'fused'  # the name of the projections


class FlatOutputProjection(nn.Module):
  """The output projection [B, T, N, H] to [B, T, D] of attention by one weight [N · H, D].

  It takes the place of a Projection, with the same arguments.
  """

  equation: str
  shape: Sequence[int]
  axes: Sequence[str | None]
  projection_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTNH: jax.Array) -> jax.Array:
    model_dims, *heads = self.shape
    project = self.projection_tpl(
      equation='BTE,ED->BTD', shape=(math.prod(heads), model_dims), axes=('heads', 'embed'),
      name=FUSED,
    )  # fmt: skip
    return project(x_BTNH.reshape(*x_BTNH.shape[:2], -1))


class FusedQkv(nn.Module):
  """Queries [B, T, N, H], and keys and values [B, T, K, H], by one weight [D, K, N/K + 2, H].

  The weight has the queries of a key head, its key and its value side by side, so that devices that
  share the key heads have what belongs together.
  """

  model_dims: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  projection_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries = self.num_heads // self.num_kv_heads
    y_BTKGH = self.projection_tpl(
      equation='BTD,DKGH->BTKGH',
      shape=(self.model_dims, self.num_kv_heads, queries + 2, self.head_dim),
      axes=('embed', 'heads', None, 'head_dim'),
      name=FUSED,
    )(x_BTD)
    query_BTNH = y_BTKGH[..., :queries, :].reshape(*x_BTD.shape[:2], self.num_heads, self.head_dim)
    query_BTNH = shard(query_BTNH, 'batch', 'length', 'act_heads', None)
    return query_BTNH, y_BTKGH[..., queries, :], y_BTKGH[..., queries + 1, :]


class FusedGatedFeedForward(GatedFeedForward):
  """GatedFeedForward with one weight [D, 2, F] for the gate and what it is multiplied with."""

  def hidden(self, x_BTD: jax.Array) -> jax.Array:
    y_BTUF = self.projection_tpl(
      equation='BTD,DUF->BTUF', shape=(self.model_dims, len(self.up_names), self.hidden_dims),
      axes=('embed', None, 'mlp'), name=FUSED,
    )(x_BTD)  # fmt: skip
    return recomputed(self.activate)(*(y_BTUF[:, :, i] for i in range(len(self.up_names))))
