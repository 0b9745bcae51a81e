"""Low-rank factors of experts, which have one weight for each of them, [E, in, out]."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from paxlite.adapters.lora import Chosen, chosen_at
from paxlite.layers.moe.moe import MoeFeedForward, Weights
from paxlite.layers.projection import Initializer
from paxlite.parallel.partitioning import param, shard


class ExpertFactors(nn.Module):
  """ΔW = scale·A·B of the weights [E, in, out] of experts; N weights of one input have one A.

  A is lora_a [E, in, rank], initialized like the weights. B is lora_b [N, E, rank, out], and starts
  at 0. Gates and the products beside them have one A, as in peft, for which both are one parameter.
  """

  rank: int  # rank of ΔW
  scale: float  # factor of the product
  a_init: Initializer  # initializer of A
  dtype: DTypeLike = jnp.float32  # dtype of ΔW

  @nn.compact
  def __call__(
    self, number: int, shape: tuple[int, int, int], axes: tuple[str, str, str]
  ) -> jax.Array:
    """Returns ΔW, [N, E, in, out], of N = `number` weights of this shape [E, in, out]."""
    (E, I, O), (experts, inputs, outputs) = shape, axes
    read, made = 'JECI,EIR->JECR', 'JECR,NERO->NJECO'
    a = param(
      self, 'lora_a', self.a_init, [E, I, self.rank], [experts, inputs, None], equation=read
    )
    zeros, size = nn.initializers.zeros, [number, E, self.rank, O]
    b = param(self, 'lora_b', zeros, size, [None, experts, None, outputs], equation=made)
    delta = jnp.einsum('EIR,NERO->NEIO', a.astype(self.dtype), (b * self.scale).astype(self.dtype))
    return shard(delta, None, *axes)


class LoraMoeFeedForward(MoeFeedForward):
  """A MoeFeedForward with factors of experts, added to the weights in memory, as in peft."""

  # the factors of modules by their paths; see LoraProjection
  chosen: tuple[Chosen, ...] | None = None

  def expert_weights(self) -> Weights:
    weights = super().expert_weights()
    E, D, F = self.num_experts, self.model_dims, self.hidden_dims
    to_F, to_D = ('experts', 'expert_embed', 'mlp'), ('experts', 'mlp', 'expert_embed')
    w_in = self._sums('in_factors', weights.w_in_EDF, (E, D, F), to_F)
    (w_out,) = self._sums('out_factors', (weights.w_out_EFD,), (E, F, D), to_D)
    return weights._replace(w_in_EDF=w_in, w_out_EFD=w_out)

  def _sums(
    self,
    name: str,
    weights: tuple[jax.Array, ...],
    shape: tuple[int, int, int],
    axes: tuple[str, str, str],
  ) -> tuple[jax.Array, ...]:
    (rank, *_), (scale, *_) = chosen_at(self.chosen or (), (*self.path, name))
    if not rank:
      return weights
    made = ExpertFactors(rank, scale, self.w_init, self.dtype, name=name)
    return tuple(w + d for w, d in zip(weights, made(len(weights), shape, axes), strict=True))
