"""The product of activations and a weight as a module, which other backends replace.

FP8 and Transformer Engine keep a state for each product, in the collections FP8_COLLECTIONS. A
train step replaces these collections by their gradients; see flax.linen.fp8_ops.
"""

import jax
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from paxlite.layers.precision.weight_matmul import weight_matmul

# scales and histories of largest absolute values, from Flax and from Transformer Engine's layers
FP8_COLLECTIONS = (OVERWRITE_WITH_GRADIENT, 'fp8_metas')
FP8_LARGEST = 'fp8_largest'  # the name of the largest absolute values, for checkpoint policies


class Einsum(nn.Module):
  """einsum(equation, x, w) + b in XLA, in the common dtype of x and w.

  b is optional and has the rank of the result, with sizes of 1 in the dimensions that w lacks. None
  is given where x, w and the result share a dimension, as with experts.
  """

  equation: str  # einsum equation of activations and weight, with single letters and no ellipsis
  # the weight's logical axes if the first dimension of the activations is the batch; or None
  axes: tuple[str | None, ...] | None = None

  @nn.compact
  def __call__(self, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    return with_bias(weight_matmul(self.equation, x, w, self.axes), b)


def with_bias(y: jax.Array, b: jax.Array | None) -> jax.Array:
  """Returns y + b, or y if there is no bias."""
  return y if b is None else y + b
