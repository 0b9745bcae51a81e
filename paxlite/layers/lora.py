"""Low-rank adaptation (https://arxiv.org/abs/2106.09685), a projection that trains few weights."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.layers.projection import Initializer, Projection
from paxlite.parallel.partitioning import gather_weight, param

LORA_SUM = 'lora_sum'  # the name of a projection's output, for checkpoint policies


class LoraProjection(Projection):
  """y = einsum(equation, x, w + ΔW) + b with ΔW = A·Bᵀ, which is never computed itself.

  A is lora_a [in, rank], initialized like w. B is lora_b [out, rank], and starts at 0. `in` is the
  product of the weight's dimensions that the input has, and `out` the product of the others. For
  queries, w [D, N, H] has A [D, rank] and B [N·H, rank]. For the output projection, whose input
  ends in [N, H], w [D, N, H] has A [N·H, rank] and B [D, rank]. Combined queries, keys and values
  have A [3, D, rank] and B [3, N·H, rank]. There is no alpha, as in Pax.

  Attributes:
    rank: Rank of ΔW.
    a_init: Initializer of A; None means that of w. It must not be zero, as B is.
  """

  rank: int = 8
  a_init: Initializer | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = super().__call__(x)
    delta, _ = self.delta(x)
    return checkpoint_name(y + delta.reshape(y.shape), LORA_SUM)

  def delta(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the product of x with ΔW, whose outputs are one dimension, and A and B."""
    stacked, read, made = self.parts
    k = 'k' if stacked else ''
    to_hidden, to_delta = f'bti,{k}ir->bt{k}r', f'bt{k}r,{k}or->bt{k}o'

    def factor(
      name: str, init: nn.initializers.Initializer, dims: list[int], equation: str
    ) -> jax.Array:
      shape = [*(self.shape[i] for i in stacked), math.prod(self.shape[i] for i in dims), self.rank]
      axes = [*(self.axes[i] for i in stacked), self.axes[dims[0]], 'lora_rank']
      w = param(self, name, init, shape, axes, equation=equation)
      return gather_weight(w.astype(self.dtype), axes)

    a = factor('lora_a', self.a_init or self.w_init, read, to_hidden)
    b = factor('lora_b', nn.initializers.zeros, made, to_delta)
    kept = x.ndim - len(read)  # batch and length; the dimensions that are summed over come last
    x_flat = x.astype(self.dtype).reshape(*x.shape[:kept], -1)
    return jnp.einsum(to_delta, jnp.einsum(to_hidden, x_flat, a), b), (a, b)

  @property
  def parts(self) -> tuple[list[int], list[int], list[int]]:
    """The indices of the weight's dimensions that are stacked, summed over, and outputs."""
    in_dims, weight_dims, _ = self.equation.replace('->', ',').split(',')
    stacked = [i for i, axis in enumerate(self.axes) if axis == 'qkv']
    read = [i for i, d in enumerate(weight_dims) if d in in_dims]
    made = [i for i in range(len(weight_dims)) if i not in read + stacked]
    return stacked, read, made
