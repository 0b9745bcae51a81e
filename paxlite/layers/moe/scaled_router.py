"""Gemma 4's router, which has a norm of its own, and learned factors of the weights of experts."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.layers.moe.moe import Routing, TopKRouter, route
from paxlite.layers.norms import UnscaledRmsNorm
from paxlite.parallel.partitioning import param


class ScaledRouter(TopKRouter):
  """A TopKRouter of scale · norm(x) / √D, whose weights are multiplied by a factor of each expert.

  The norm is that of an RmsNorm without a scale. `scale` [D] and `expert_scale` [E] start at 1.
  Weights of a token's experts sum to 1 before their factors.

  Attributes:
    epsilon: ε of the norm.
  """

  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x_JMD: jax.Array, is_token_JM: jax.Array) -> Routing:
    D, ones = x_JMD.shape[-1], nn.initializers.ones
    scale_D = param(self, 'scale', ones, [D], ['norm'])
    scale_E = param(self, 'expert_scale', ones, [self.num_experts], [None])
    normed_JMD = UnscaledRmsNorm(self.epsilon, jnp.float32, name='norm')(x_JMD)
    logits_JME = self.logits(normed_JMD * scale_D * D**-0.5)
    routing = route(logits_JME, is_token_JM, self.top_k, self.normalized)
    return routing._replace(weights_JMX=routing.weights_JMX * scale_E[routing.experts_JMX])
