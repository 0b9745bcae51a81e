"""Low-rank adaptation (https://arxiv.org/abs/2106.09685), a projection that trains few weights."""

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.layers.projection import Initializer, Projection
from paxlite.layers.remat import LORA_SUM
from paxlite.parallel.partitioning import gather_weight, param
from paxlite.quantization.quantized_projection import QuantizedProjection, quantizes

# A regular expression of the paths of modules, and the rank and the scale of their factors: of a
# combined weight those of each part, of which some may have rank 0.
Chosen = tuple[str, tuple[int, ...], tuple[float, ...]]


def chosen_at(
  chosen: Sequence[Chosen], path: Sequence[str]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
  """Returns the ranks and scales of the module at a path; rank 0 if it is not chosen."""
  name = '/'.join(path)
  return next(
    ((ranks, scales) for pattern, ranks, scales in chosen if re.fullmatch(pattern, name)),
    ((0,), (1.0,)),
  )


class LoraProjection(Projection):
  """y = einsum(equation, x, w + ΔW) + b with ΔW = scale·A·Bᵀ, which is never computed itself.

  A is lora_a [in, rank], initialized like w. B is lora_b [out, rank], and starts at 0. `in` is the
  product of the weight's dimensions that the input has, and `out` the product of the others. For
  queries, w [D, N, H] has A [D, rank] and B [N·H, rank]. For the output projection, whose input
  ends in [N, H], w [D, N, H] has A [N·H, rank] and B [D, rank]. Combined queries, keys and values
  have A [3, D, rank] and B [3, N·H, rank]; columns beyond the rank of a part are left out.
  """

  rank: int = 8  # rank of ΔW
  # factor of the product: alpha / rank, or alpha / √rank (rsLoRA, https://arxiv.org/abs/2312.03732)
  factor_scale: float = 1.0
  dropout: float = 0.0  # dropout rate of the input of A
  # The factors of modules by their paths, in place of `rank` and `factor_scale`. A module that none
  # of them names has no factors. None: all have the same.
  chosen: tuple[Chosen, ...] | None = None
  # Initializer of A; None means that of w. It must not be zero, as B is.
  a_init: Initializer | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = super().__call__(x)
    if not self.max_rank:
      return y
    delta, _ = self.delta(x)
    return checkpoint_name(y + delta.reshape(y.shape), LORA_SUM)

  @property
  def factors(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The ranks of the parts of the weight, or of all of it, and the scales."""
    if self.chosen is None:
      return (self.rank,), (self.factor_scale,)
    return chosen_at(self.chosen, self.path)

  @property
  def max_rank(self) -> int:
    return max(self.factors[0])

  def delta(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns x·ΔW, with one output dimension, and A and scale·B."""
    stacked, read, made = self.parts
    k = 'k' if stacked else ''
    to_hidden, to_delta = f'bti,{k}ir->bt{k}r', f'bt{k}r,{k}or->bt{k}o'
    ranks, scales = self.factors

    def factor(
      name: str, init: nn.initializers.Initializer, dims: list[int], equation: str
    ) -> jax.Array:
      size = self.max_rank
      shape = [*(self.shape[i] for i in stacked), math.prod(self.shape[i] for i in dims), size]
      axes = [*(self.axes[i] for i in stacked), self.axes[dims[0]], 'lora_rank']
      w = param(self, name, init, shape, axes, equation=equation)
      if name == 'lora_a' and {*ranks} != {size}:
        w = w * (jnp.arange(size) < jnp.array(ranks)[:, None])[:, None]
      if name == 'lora_b' and {*scales} != {1.0}:
        w = w * (scales[0] if len({*scales}) == 1 else jnp.array(scales, w.dtype)[:, None, None])
      return gather_weight(w.astype(self.dtype), axes)

    a = factor('lora_a', self.a_init or self.w_init, read, to_hidden)
    b = factor('lora_b', nn.initializers.zeros, made, to_delta)
    kept = x.ndim - len(read)  # batch and length; the dimensions that are summed over come last
    x_flat = x.astype(self.dtype).reshape(*x.shape[:kept], -1)
    if self.dropout:
      x_flat = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))(x_flat)
    return jnp.einsum(to_delta, jnp.einsum(to_hidden, x_flat, a), b), (a, b)

  @property
  def parts(self) -> tuple[list[int], list[int], list[int]]:
    """The indices of the weight's dimensions that are stacked, summed over, and outputs."""
    in_dims, weight_dims, _ = self.equation.replace('->', ',').split(',')
    stacked = [i for i, axis in enumerate(self.axes) if axis == 'qkv']
    read = [i for i, d in enumerate(weight_dims) if d in in_dims]
    made = [i for i in range(len(weight_dims)) if i not in read + stacked]
    return stacked, read, made


@quantizes(LoraProjection)
class QuantizedLoraProjection(LoraProjection, QuantizedProjection):
  """A LoraProjection with a quantized weight; the low-rank factors keep their dtype."""
