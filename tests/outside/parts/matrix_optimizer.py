"""An optimizer that orthogonalizes the updates of matrices, as Muon, and trains the rest by Adam.

https://kellerjordan.github.io/posts/muon/
"""

import math

import jax
import jax.numpy as jnp
import optax

from paxlite.experiments.demo import TinyGPT
from paxlite.optim.by_name import register
from paxlite.parallel.weight_dims import WeightDims, weight_dims


def orthogonal(g_io: jax.Array) -> jax.Array:
  """Returns U·Vᵀ of a matrix U·S·Vᵀ, approximately, by five Newton-Schulz steps."""

  def step(_, x: jax.Array) -> jax.Array:
    a = x @ x.T
    return 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x

  return jax.lax.fori_loop(0, 5, step, g_io / (jnp.linalg.norm(g_io) + 1e-7))


def of_matrices(g: jax.Array, dims: WeightDims) -> jax.Array:
  """Returns each matrix of a weight orthogonal, with updates of the size of Adam's."""
  order = (*dims.stacked, *dims.inputs, *dims.outputs)
  moved = g.transpose(order)
  fan_in, fan_out = (math.prod(g.shape[i] for i in d) for d in (dims.inputs, dims.outputs))
  found = jax.vmap(orthogonal)(moved.reshape(-1, fan_in, fan_out))
  scale = 0.2 * max(fan_in, fan_out) ** 0.5
  return scale * found.reshape(moved.shape).transpose([order.index(i) for i in range(g.ndim)])


@register('orthogonal')
class orthogonal_momentum:
  adam_beta2: float
  weight_decay: float
  momentum: float = 0.9

  def transformation(self, schedule):
    found = lambda grads, _: jax.tree.map(of_matrices, grads, weight_dims(grads))
    kind = lambda dims: 'matrix' if dims.is_matrix else 'rest'
    matrices = optax.chain(optax.trace(self.momentum, nesterov=True), optax.stateless(found))
    both = {'matrix': matrices, 'rest': optax.scale_by_adam(self.momentum, self.adam_beta2)}
    return optax.chain(
      optax.partition(both, lambda params: jax.tree.map(kind, weight_dims(params))),
      optax.add_decayed_weights(self.weight_decay),
      optax.scale_by_learning_rate(schedule),
    )


class Orthogonal(TinyGPT):
  OPTIMIZER = 'orthogonal'
  LR_COS_WARMUP = 0
  MAX_STEPS = 4
