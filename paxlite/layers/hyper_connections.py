"""Manifold-constrained hyper-connections: several streams of activations instead of one.

See https://arxiv.org/abs/2512.24880, and https://arxiv.org/abs/2409.19606 for hyper-connections
without the constraint. A layer reads a weighted sum of the N streams [B, T, N, D]. What it returns
is added to each stream with a weight, and the streams are mixed by a matrix [N, N] of each token,
whose rows and columns sum to 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.parallel.partitioning import param, shard


class Connection(NamedTuple):
  """How one layer is connected to the streams, for each token.

  Attributes:
    read_BTD: What the layer reads.
    write_BTN: The weight of what it returns, in each stream, in float32.
    mix_BTNN: How much of each stream, the first N, goes into each of the new ones, in float32.
  """

  read_BTD: jax.Array
  write_BTN: jax.Array
  mix_BTNN: jax.Array

  def joined(self, x_BTND: jax.Array, h_BTD: jax.Array) -> jax.Array:
    """Returns the new streams [B, T, N, D], from the old ones and what the layer returns."""
    mixed_BTND = jnp.einsum('BTNM,BTND->BTMD', self.mix_BTNN.astype(x_BTND.dtype), x_BTND)
    written_BTND = self.write_BTN.astype(x_BTND.dtype)[..., None] * h_BTD[:, :, None]
    return shard(written_BTND + mixed_BTND, 'batch', 'residual_length', None, 'act_embed')


class StreamWeights(nn.Module):
  """w·norm(x), [B, T, N, D] to [B, T, M] in float32, with the norm over all N · D elements.

  Attributes:
    num_weights: M.
    epsilon: ε of the norm, which has no scale.
  """

  num_weights: int
  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x_BTND: jax.Array) -> jax.Array:
    shape, axes = [self.num_weights, *x_BTND.shape[2:]], [None, None, 'embed']
    equation = 'BTND,MND->BTM'
    w_MND = param(self, 'w', nn.initializers.normal(0.02), shape, axes, equation=equation)
    x_BTND = x_BTND.astype(jnp.float32)
    square_BT11 = jnp.square(x_BTND).mean((2, 3), keepdims=True)
    return jnp.einsum(equation, x_BTND * jax.lax.rsqrt(square_BT11 + self.epsilon), w_MND)


class HyperConnection(nn.Module):
  """Computes from the streams [B, T, N, D] how a layer is connected to them.

  w·norm(x) has three parts. Each is multiplied by a number of its own, and a bias is added. The
  weights of reading are sigmoids of the first part, and those of writing twice the sigmoids of the
  second. The mixing matrix is a softmax of the third, which is then normalized in turn along its
  columns and its rows (the iterations of Sinkhorn and Knopp).

  Attributes:
    iterations: How often the matrix is normalized along its columns.
    floor: What is added to weights and to sums, so that none is 0.
    epsilon: ε of the norm of the streams.
  """

  iterations: int = 20
  floor: float = 1e-6
  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x_BTND: jax.Array) -> Connection:
    N = x_BTND.shape[2]
    parts = [N, 2 * N]
    M = 2 * N + N * N
    weights_BTM = StreamWeights(M, self.epsilon, name='weights')(x_BTND)
    b_M = param(self, 'b', nn.initializers.zeros, [M], [None])
    scale_3 = param(self, 'scale', nn.initializers.ones, [3], [None])
    read_BTN, write_BTN, mix_BTX = (
      w * scale + b
      for w, scale, b in zip(
        jnp.split(weights_BTM, parts, axis=-1), scale_3, jnp.split(b_M, parts), strict=True
      )
    )
    read_BTN = jax.nn.sigmoid(read_BTN) + self.floor
    mix_BTNN = jax.nn.softmax(mix_BTX.reshape(*mix_BTX.shape[:2], N, N), axis=-1) + self.floor
    return Connection(
      weighted_sum(read_BTN, x_BTND),
      2 * jax.nn.sigmoid(write_BTN),
      balanced(mix_BTNN, self.iterations, self.floor),
    )


class MergedStreams(nn.Module):
  """A weighted sum of the streams, [B, T, N, D] to [B, T, D]: the last block of such a stack.

  The weights are sigmoid(s · w·norm(x) + b), [B, T, N].

  Attributes:
    floor: What is added to the weights.
    epsilon: ε of the norm of the streams.
  """

  floor: float = 1e-6
  epsilon: float = 1e-6

  @nn.compact
  def __call__(
    self,
    x_BTND: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    del positions_BT, segment_ids_BT, inputs
    N = x_BTND.shape[2]
    weights_BTN = StreamWeights(N, self.epsilon, name='weights')(x_BTND)
    b_N = param(self, 'b', nn.initializers.zeros, [N], [None])
    scale_1 = param(self, 'scale', nn.initializers.ones, [1], [None])
    read_BTN = jax.nn.sigmoid(weights_BTN * scale_1 + b_N) + self.floor
    return shard(weighted_sum(read_BTN, x_BTND), 'batch', 'residual_length', 'act_embed')


class EqualStreams(nn.Module):
  """N streams that are the same, [B, T, D] to [B, T, N, D]: the first block of such a stack.

  Attributes:
    num_streams: N.
  """

  num_streams: int

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    del positions_BT, segment_ids_BT, inputs
    B, T, D = x_BTD.shape
    x_BTND = jnp.broadcast_to(x_BTD[:, :, None], (B, T, self.num_streams, D))
    return shard(x_BTND, 'batch', 'residual_length', None, 'act_embed')


def weighted_sum(weights_BTN: jax.Array, x_BTND: jax.Array) -> jax.Array:
  """Returns the weighted sum of the streams, computed in float32, in their dtype, [B, T, D]."""
  return (weights_BTN[..., None] * x_BTND).sum(2).astype(x_BTND.dtype)


def balanced(mix_BTNN: jax.Array, iterations: int, floor: float) -> jax.Array:
  """Returns positive matrices whose columns sum to 1, and nearly their rows, [..., N, N].

  Args:
    mix_BTNN: Positive matrices.
    iterations: How often they are normalized along their columns; before each time but the first,
      along their rows.
    floor: What is added to the sums.
  """
  columns = lambda x: x / (x.sum(-2, keepdims=True) + floor)
  rows = lambda x: x / (x.sum(-1, keepdims=True) + floor)
  step = lambda x, _: (columns(rows(x)), None)
  return jax.lax.scan(step, columns(mix_BTNN), None, length=iterations - 1)[0]
