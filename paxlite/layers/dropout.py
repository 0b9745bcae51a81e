"""Dropout with separate random keys for the microbatches of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import LazyRng


class MicrobatchDropout(nn.Module):
  """Dropout with the masks that microbatches have when they are computed one after another.

  Microbatch i is every n-th row from row i on, and its key is that of the batch with i folded in,
  as in task.Task.grads.
  """

  rate: float  # the share of the entries that are set to 0

  def __call__(self, x_BTD: jax.Array, microbatches: int = 1) -> jax.Array:
    """Applies dropout to a batch that consists of `microbatches` microbatches.

    If their number does not divide the rows, the batch is one microbatch.
    """
    if self.rate == 0:
      return x_BTD
    assert self.scope is not None
    rng = self.scope.rngs['dropout']
    dropout = nn.Dropout(self.rate, deterministic=False, parent=None)

    def one(x: jax.Array, key: jax.Array) -> jax.Array:
      # Flax knows only keys here, and does not say that the result is an array.
      rngs: Any = {'dropout': LazyRng.create(key, *rng.suffix)}
      y: Any = dropout.apply({}, x, rngs=rngs)
      return y

    n, B = microbatches, len(x_BTD)
    if n == 1 or B % n:
      return one(x_BTD, rng.rng)
    parts = lambda x: x.reshape(B // n, n, *x.shape[1:])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng.rng, jnp.arange(n))
    return jax.vmap(one, in_axes=(1, 0), out_axes=1)(parts(x_BTD), keys).reshape(x_BTD.shape)
