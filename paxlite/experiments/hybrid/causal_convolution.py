"""A short causal convolution over the tokens of each channel."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.experiments.hybrid.row_state import RowState
from paxlite.layers.projection import Initializer
from paxlite.parallel.partitioning import param


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Returns values up to 1 / √W in both directions, as for a layer with W inputs."""
  most = shape[0] ** -0.5
  return jax.random.uniform(key, shape, dtype, -most, most)


class CausalConvolution(nn.Module):
  """y_t = Σ_j w_j · x_{t−W+1+j} + b, [B, T, …] to [B, T, …]: W tokens, the latest of them last.

  A token of a packed row sees only the tokens of its own segment.
  """

  width: int  # W
  axes: tuple[str | None, ...]  # the logical axes of the channels
  use_bias: bool = False  # whether there is a bias
  w_init: Initializer = _uniform  # initializer of the weight, [W, …]

  @nn.compact
  def __call__(
    self, x: jax.Array, segment_ids_BT: jax.Array | None, rows: RowState, name: str
  ) -> jax.Array:
    """Returns y.

    Args:
      x: [B, T, …].
      segment_ids_BT: Segments of the tokens, or None.
      rows: Keeps the latest W − 1 tokens.
      name: Of what it keeps.
    """
    (B, T), channels, reach = x.shape[:2], x.shape[2:], self.width - 1
    axes = (None, *self.axes)
    w = param(self, 'w', self.w_init, (self.width, *channels), axes).astype(jnp.float32)
    before = rows.before(name, (reach, *channels), x.dtype)
    if before is None:
      before = jnp.zeros((B, reach, *channels), x.dtype)
    seen = jnp.concatenate([before, x], 1)
    rows.keep(name, rows.latest(seen, reach))
    y = x.astype(jnp.float32) * w[-1]
    for j in range(reach):
      back = reach - j
      term = seen[:, j : j + T].astype(jnp.float32) * w[j]
      if segment_ids_BT is not None:
        same_BT = jnp.pad(segment_ids_BT, [(0, 0), (back, 0)])[:, :T] == segment_ids_BT
        same_BT &= jnp.arange(T) >= back
        term = jnp.where(same_BT.reshape(B, T, *[1] * len(channels)), term, 0)
      y += term
    if self.use_bias:
      y += param(self, 'b', nn.initializers.zeros, channels, list(self.axes))
    return y.astype(x.dtype)
