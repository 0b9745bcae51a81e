"""ALiBi: scores decrease with the distance of a key (https://arxiv.org/abs/2108.12409)."""

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import template
from paxlite.experiments.demo import TinyGPT
from paxlite.parallel.partitioning import shard


class Alibi(nn.Module):
  """A bias of the scores that is not learned: −slope · distance, with a slope for each head.

  Attributes:
    num_heads: N; the slopes are 2^(−8/N), 2^(−16/N), …, 2^(−8).
  """

  num_heads: int

  @nn.compact
  def __call__(self, B: int, T: int, S: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns the bias [1, N, T, S], which all rows share; `start` as in RelativeBias."""
    del B
    slope_N = 2.0 ** (-8 / self.num_heads * jnp.arange(1, self.num_heads + 1))
    distance_TS = start + jnp.arange(T)[:, None] - jnp.arange(S)
    bias_1NTS = -slope_N[None, :, None, None] * distance_TS
    return shard(bias_1NTS, None, 'act_heads', 'length', None)


class WithoutPositions(TinyGPT):
  """TinyGPT without any positions."""

  TRAINABLE_POSITION_EMB = False
  INIT_STD = 0.3  # so that attention matters from the first step on
  PERCORE_BATCH_SIZE = 1
  MAX_STEPS = 3


class AlibiGPT(WithoutPositions):
  """The same with ALiBi."""

  def dot_product_attention(self) -> fdl.Partial:
    attention = super().dot_product_attention()
    attention.relative_bias_tpl = template(Alibi, num_heads=self.NUM_HEADS)
    return attention
