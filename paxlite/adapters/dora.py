"""DoRA (https://arxiv.org/abs/2402.09353): low-rank factors that change the directions of a weight.

The lengths are trained by themselves.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.adapters.lora import LoraProjection
from paxlite.layers.precision.einsum import with_bias
from paxlite.layers.remat import LORA_SUM
from paxlite.parallel.partitioning import gather_weight, param
from paxlite.quantization.quantized_projection import QuantizedProjection, quantizes


class DoraProjection(LoraProjection):
  """y = m ⊙ einsum(equation, x, (w + A·Bᵀ) / ‖w + A·Bᵀ‖) + b, with the norm of each output.

  m is ‖w‖ + lora_m. lora_m [out] starts at 0, and [3, out] for combined queries, keys and values.
  The norm has no gradient, as section 4.3 of the paper has it. It is computed from the factors, so
  that the sum of the weights never exists.
  """

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.product(x)
    if not self.max_rank:
      return with_bias(y, super().bias())
    delta, (a, b) = self.delta(x)
    stacked, _, made = self.parts
    out = [*(self.shape[i] for i in stacked), math.prod(self.shape[i] for i in made)]
    axes = [*(self.axes[i] for i in stacked), self.axes[made[0]]]
    grown = gather_weight(param(self, 'lora_m', nn.initializers.zeros, out, axes), axes)
    if 0 in (ranks := self.factors[0]):  # parts without factors keep their lengths
      grown = grown * (jnp.array(ranks) > 0)[:, None]
    before, now = self._norms(a, b)
    scale = (before + grown) / now
    scale = self.like_output(scale.reshape([self.shape[i] for i in self.made_dims]))
    y = (y + delta.reshape(y.shape)) * scale.astype(self.dtype)
    return checkpoint_name(with_bias(y, super().bias()), LORA_SUM)

  def bias(self) -> jax.Array | None:
    return None  # of the product, as the bias is not scaled

  def _norms(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the norms of each output's weights without and with A·Bᵀ, float32 like lora_m."""
    stacked, read, made = self.parts
    a, b = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in (a, b))
    w = self.stored_weight().astype(jnp.float32).transpose(*stacked, *read, *made)
    sizes = [math.prod(self.shape[i] for i in dims) for dims in (read, made)]
    w = w.reshape(*(self.shape[i] for i in stacked), *sizes)
    squares = jnp.square(w).sum(-2)
    cross = (jnp.einsum('...io,...ir->...or', w, a) * b).sum(-1)
    gram = jnp.einsum('...ir,...is->...rs', a, a)
    of_factors = (jnp.einsum('...or,...rs->...os', b, gram) * b).sum(-1)
    tiny = jnp.finfo(jnp.float32).tiny  # an output whose weights are all zero stays so
    norm = lambda x: jnp.sqrt(jnp.maximum(x, tiny))
    return norm(squares), norm(squares + 2 * cross + of_factors)


@quantizes(DoraProjection)
class QuantizedDoraProjection(DoraProjection, QuantizedProjection):
  """A DoraProjection with a quantized weight; trained variables keep their dtype."""
