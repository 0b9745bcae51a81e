"""DeepSeek's router, which chooses experts from a few groups and balances their load by a bias."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.training_rules import moved_by
from paxlite.layers.moe.moe import Routing, TopKRouter
from paxlite.parallel.partitioning import param


class GroupRouter(TopKRouter):
  """Chooses the experts of each token from a few groups of experts, as DeepSeek-V2 and V3 do.

  DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.2) has scores sigmoid(x·gate), and a
  group's score is the sum of its two best. A bias [E] is added to the scores when experts are
  chosen, and not to their weights. No gradient reaches it: what a backward pass returns in place of
  its gradient is the load of the experts, and `balanced` moves it once after each step. DeepSeek-V2
  (https://arxiv.org/abs/2405.04434, section 2.2.2) has the scores of a softmax and no bias, and a
  group's score is its best one. Scores of a softmax may have the bias, too.
  """

  num_groups: int = 1  # the number of groups, which have equal numbers of experts
  top_groups: int = 1  # the number of groups that are chosen
  best_per_group: int = 2  # the number of experts whose scores add up to that of their group
  use_sigmoid: bool = True  # whether scores are those of sigmoids, and otherwise of a softmax
  has_bias: bool = True  # whether there is a bias that balances the load
  scale: float = 1.0  # factor of the weights

  @nn.compact
  def __call__(self, x_JMD: jax.Array, is_token_JM: jax.Array) -> Routing:
    E, X, G = self.num_experts, self.top_k, self.num_groups
    logits_JME = self.logits(x_JMD)
    scores_JME = self.scores(logits_JME)
    chosen_JME = jax.lax.stop_gradient(scores_JME)
    if self.has_bias:
      bias_E = param(self, LOAD_BIAS, nn.initializers.zeros, [E], [None])
      chosen_JME += jax.lax.stop_gradient(bias_E)
    in_groups_JMGe = chosen_JME.reshape(*chosen_JME.shape[:2], G, E // G)
    best_JMGe = jax.lax.top_k(in_groups_JMGe, min(self.best_per_group, E // G))[0]
    _, groups_JMg = jax.lax.top_k(best_JMGe.sum(-1), self.top_groups)
    is_in_JMG = jax.nn.one_hot(groups_JMg, G).sum(-2) > 0
    masked_JMGe = jnp.where(is_in_JMG[..., None], in_groups_JMGe, -jnp.inf)
    _, experts_JMX = jax.lax.top_k(masked_JMGe.reshape(chosen_JME.shape), X)
    values_JMX = jnp.take_along_axis(scores_JME, experts_JMX, axis=-1)
    if self.normalized:
      values_JMX = values_JMX / (values_JMX.sum(-1, keepdims=True) + 1e-20)
    weights_JMX = self.scale * values_JMX * is_token_JM[..., None]
    if self.has_bias:
      load_E = (jax.nn.one_hot(experts_JMX, E) * is_token_JM[..., None, None]).sum((0, 1, 2))
      weights_JMX = _with_load(weights_JMX, bias_E, jax.lax.stop_gradient(load_E))
    probabilities_JME = scores_JME / scores_JME.sum(-1, keepdims=True)
    return Routing(experts_JMX, weights_JMX, probabilities_JME, is_token_JM)

  def scores(self, logits_JME: jax.Array) -> jax.Array:
    """Returns the scores of the experts of each token, [J, M, E] float32."""
    return jax.nn.sigmoid(logits_JME) if self.use_sigmoid else jax.nn.softmax(logits_JME)


def balanced(bias: jax.Array, load: jax.Array, rate: float = 0.001) -> jax.Array:
  """Returns the bias of the next step, by DeepSeek-V3's rule, [..., E].

  It grows by `rate` for experts with less than the mean load, and shrinks by as much for those with
  more.

  Args:
    bias: The bias of this step.
    load: How many tokens of the whole batch chose each expert, in float32. Sums are exact up to
      2^24, and beyond that to 7 digits, so that an expert that has the mean load may move too.
    rate: How much the bias changes.
  """
  return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)


LOAD_BIAS = moved_by('replaced_bias', balanced)


@jax.custom_vjp
def _with_load(x: jax.Array, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
  """Returns x; what stands for the gradient of the bias is the load.

  Gradients are added up over devices, microbatches and ticks of a pipeline, and loads may be too.
  """
  return x


_with_load.defvjp(
  lambda x, bias_E, load_E: (x, load_E), lambda load_E, dx: (dx, load_E, jnp.zeros_like(load_E))
)
