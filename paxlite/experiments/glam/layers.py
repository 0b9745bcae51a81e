"""T5's bias of attention logits, which depends on the distance of a query from a key alone."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.parallel.partitioning import active_platform, param, shard, shards_of

_TILE = 128  # queries and keys of a tile; the lanes of a TPU's vectors


class RelativeBias(nn.Module):
  """A bias of the attention logits, learned for each head and bucket of distances.

  This is T5's bias, for causal attention (https://arxiv.org/abs/1910.10683, section 2.1). Half of
  the buckets hold one distance each, from 0 on. The sizes of the others grow by a constant factor
  up to max_distance.

  Every device has a copy of the weight for its rows. So the gradient of its bias is summed over
  distances where it is, and devices add up the gradients of N · buckets numbers.
  """

  num_heads: int  # N
  num_buckets: int = 32  # number of columns of the weight wrb [N, buckets]
  max_distance: int = 128  # distances from this one on share the last bucket

  @nn.compact
  def __call__(self, B: int, T: int, S: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns biases [J, N, T, S] for J groups of neighboring rows, one on each device.

    Where a key is after its query, the bias has no meaning.

    Args:
      B: Number of rows.
      T: Number of queries of a row.
      S: Number of keys of a row; if they are as many as the queries, start is 0.
      start: Index of the first query among the keys, an integer or [B]; [B] gives J = B groups.
    """
    shape = [self.num_heads, self.num_buckets]
    init = nn.initializers.normal(1 / math.sqrt(math.prod(shape)))
    wrb = param(self, 'wrb', init, shape, ['heads', None])
    if jnp.ndim(start):
      start_B111 = jnp.asarray(start)[:, None, None, None]
      distances_B1TS = start_B111 + jnp.arange(T)[:, None] - jnp.arange(S)
      bucket = jax.nn.one_hot(self._bucket(distances_B1TS)[:, 0], self.num_buckets)
      bias_BNTS = jnp.einsum('Nk,BTSk->BNTS', wrb, bucket, precision='highest')
      return shard(bias_BNTS, 'batch', 'act_heads', None, None)
    J = shards_of('batch', B)
    wrb = shard(jnp.broadcast_to(wrb, (J, *shape)), 'batch', 'act_heads', None)
    t, s = _tile(T, S)
    # tiles further from the diagonal than the last kind have max_distance between all their pairs
    kinds = min(T // t, 2 + -(-(self.max_distance - 1) // t))
    distances = start + t * jnp.arange(kinds)[:, None] + jnp.arange(t - 1, -s, -1)
    bucket = jax.nn.one_hot(self._bucket(distances), self.num_buckets)
    bias = jnp.einsum('JNk,zwk->JNzw', wrb, bucket, precision='highest')
    bias = toeplitz(bias, t)
    if kinds > 1:
      kind = jnp.clip(jnp.arange(T // t)[:, None] - jnp.arange(S // s), 0, kinds - 1)
      is_kind = kind[..., None, None] == jnp.arange(kinds)[:, None, None, None, None]
      # as a product with is_kind, this would be kept by policies that keep matrix products
      bias = jnp.where(is_kind, bias[:, :, :, None, None], 0).sum(2).swapaxes(3, 4)
    return shard(bias.reshape(J, self.num_heads, T, S), 'batch', 'act_heads', 'length', None)

  def _bucket(self, distances: jax.Array) -> jax.Array:
    """Returns the buckets of distances; negative ones are taken to be 0."""
    single = self.num_buckets // 2
    distances = jnp.maximum(distances, 0)
    share = jnp.log(jnp.maximum(distances, single) / single) / math.log(self.max_distance / single)
    large = single + (share * (self.num_buckets - single)).astype(jnp.int32)
    return jnp.where(distances < single, distances, jnp.minimum(large, self.num_buckets - 1))


def toeplitz(diagonals: jax.Array, rows: int) -> jax.Array:
  """Returns matrices whose diagonals are constant, […, rows + columns − 1] to […, rows, columns].

  The element in row t and column s is diagonals[rows − 1 − t + s].
  """
  *lead, count = diagonals.shape
  columns = count - rows + 1
  if active_platform() == 'cpu':  # CPUs copy whole rows, and add them up in the gradient
    row = lambda t: jax.lax.dynamic_slice_in_dim(diagonals, rows - 1 - t, columns, axis=-1)
    return jax.vmap(row, out_axes=-2)(jnp.arange(rows))
  # Rows of count + 1 elements, read as rows of count elements, begin one element later each. On
  # GPUs this and its gradient are indices inside other kernels.
  padded = jnp.pad(diagonals, [(0, 0)] * len(lead) + [(0, 1)])
  repeated = jnp.broadcast_to(padded[..., None, :], (*lead, rows, count + 1))
  flat = repeated.reshape(*lead, -1)[..., : rows * count]
  return flat.reshape(*lead, rows, count)[..., rows - 1 :]


def _tile(T: int, S: int) -> tuple[int, int]:
  """Returns the numbers of queries and keys of a tile of the bias.

  Tiles are small where a Toeplitz matrix must not be long: TPUs write it to memory to shift its
  rows, and a device that has a part of the queries must not compute with the others.
  """
  shards = shards_of('length', T)
  if T != S or (shards == 1 and active_platform() != 'tpu'):
    return T, S
  tile = math.gcd(T // shards, _TILE)
  return tile, tile
