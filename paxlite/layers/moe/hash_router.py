"""DeepSeek-V4's routers, with roots of softplus as scores, and one in which ids choose experts.

See https://arxiv.org/abs/2106.04426 for experts that are chosen by a table of token ids.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.variable_names import EXPERTS_OF_IDS
from paxlite.layers.moe.group_router import GroupRouter
from paxlite.layers.moe.moe import Routing, TopKRouter
from paxlite.parallel.partitioning import param


def root_softplus(logits: jax.Array) -> jax.Array:
  """Returns √softplus(x)."""
  return jnp.sqrt(jax.nn.softplus(logits))


class RootSoftplusRouter(GroupRouter):
  """A GroupRouter whose scores are √softplus(x·gate)."""

  def scores(self, logits_JME: jax.Array) -> jax.Array:
    return root_softplus(logits_JME)


class HashRouter(TopKRouter):
  """A router whose experts are those that a table [V, X] has for the id of a token.

  The weights are the scores √softplus(x·gate) of the chosen experts, over their sum if
  `normalized`, times a factor. The table holds numbers of experts; training leaves it alone.
  Without published weights, an id has X different experts at random.

  Attributes:
    vocab_size: V.
    scale: Factor of the weights.
  """

  vocab_size: int = 1
  scale: float = 1.0

  @nn.compact
  def __call__(  # type: ignore[override]
    self, x_JMD: jax.Array, is_token_JM: jax.Array, ids_JM: jax.Array
  ) -> Routing:
    shape = [self.vocab_size, self.top_k]
    table_VX = param(self, EXPERTS_OF_IDS, self._drawn, shape, [None, None])
    scores_JME = root_softplus(self.logits(x_JMD))
    experts_JMX = jax.lax.stop_gradient(table_VX)[ids_JM].astype(jnp.int32)
    values_JMX = jnp.take_along_axis(scores_JME, experts_JMX, axis=-1)
    if self.normalized:
      values_JMX = values_JMX / (values_JMX.sum(-1, keepdims=True) + 1e-20)
    weights_JMX = self.scale * values_JMX * is_token_JM[..., None]
    probabilities_JME = scores_JME / scores_JME.sum(-1, keepdims=True)
    return Routing(experts_JMX, weights_JMX, probabilities_JME, is_token_JM)

  def _drawn(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns the numbers of X experts of each id, which are different."""
    drawn_VE = jax.random.uniform(key, (shape[0], self.num_experts))
    return jax.lax.top_k(drawn_VE, shape[1])[1].astype(dtype)
