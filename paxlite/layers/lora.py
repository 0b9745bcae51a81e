"""Low-rank adaptation, https://arxiv.org/abs/2106.09685: a projection that trains few weights."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import gather_weight, param

LORA_VARIABLES = r'.*/lora_[ab]'  # a regular expression for the names of what LoRA adds


class LoraProjection(Projection):
  """y = einsum(equation, x, w + ΔW) + b with ΔW = A·Bᵀ, never formed.

  A is lora_a [in, rank], initialized as w is, and B is lora_b [out, rank], starting at 0, where
  `in` and `out` are the weight's dimensions that the input has and those that it has not, each
  flattened: w [D, N, H] of queries has A [D, rank] and B [N·H, rank]; w [D, N, H] of the output
  projection, which reads [.., N, H], has A [N·H, rank] and B [D, rank]. Combined queries, keys and
  values have A [3, D, rank] and B [3, N·H, rank]. No alpha, as in Pax.

  Attributes:
    rank: Rank of ΔW.
  """

  rank: int = 8

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = super().__call__(x)
    in_dims, weight_dims, _ = self.equation.replace('->', ',').split(',')
    stacked = [i for i, axis in enumerate(self.axes) if axis == 'qkv']
    read = [i for i, d in enumerate(weight_dims) if d in in_dims]
    made = [i for i in range(len(weight_dims)) if i not in read + stacked]

    def factor(name: str, init, dims: list[int]) -> jax.Array:
      shape = [*(self.shape[i] for i in stacked), math.prod(self.shape[i] for i in dims), self.rank]
      axes = [*(self.axes[i] for i in stacked), self.axes[dims[0]], 'lora_rank']
      return gather_weight(param(self, name, init, shape, axes).astype(self.dtype), axes)

    a = factor('lora_a', self.w_init, read)
    b = factor('lora_b', nn.initializers.zeros, made)
    kept = x.ndim - len(read)  # batch and length; what is read comes last
    x_flat = x.astype(self.dtype).reshape(*x.shape[:kept], -1)
    k = 'k' if stacked else ''
    hidden = jnp.einsum(f'bti,{k}ir->bt{k}r', x_flat, a)
    delta = jnp.einsum(f'bt{k}r,{k}or->bt{k}o', hidden, b)
    return y + delta.reshape(y.shape)
