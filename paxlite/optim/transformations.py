"""Pax's Adam and learning rate as optax transformations, which can skip an update."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.parallel.weight_dims import layer_dims

Valid = bool | jax.Array


class PaxAdamState(NamedTuple):
  count: jax.Array  # type: ignore[assignment]  # int32, completed updates
  m: PyTree
  v: PyTree


def scale_by_pax_adam(
  b1: float = 0.9,
  b2: float = 0.99,
  epsilon: float = 1e-6,
  epsilon_root: float = 0.0,
  update_clip: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
  """Returns Adam in Pax's form, which corrects the decays, so that m and v are stored corrected.

  β_t = β(1 − β^t) / (1 − β^(t+1)), where t counts from 0; m = β1_t·m + (1 − β1_t)·g; the update is
  m / (√(v + epsilon_root) + epsilon). Equal to https://arxiv.org/abs/1412.6980 in exact arithmetic.

  Args:
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    epsilon: Number added to the square root.
    epsilon_root: Number added under the square root.
    update_clip: Cap on the root mean square of each variable's update; ≤ 0 means no cap.
  """

  def init(params: PyTree) -> PaxAdamState:
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return PaxAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

  def corrected(beta: float, count: jax.Array) -> jax.Array:
    t = count.astype(jnp.float32)
    return beta * (1 - jnp.power(beta, t)) / (1 - jnp.power(beta, t + 1))

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, valid: Valid = True
  ) -> tuple[PyTree, PaxAdamState]:
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    del params
    # the gradients of a skipped update are zeros, and decays of 1 keep the moments exactly the same
    b1_t = jnp.where(valid, corrected(b1, state.count), 1)
    b2_t = jnp.where(valid, corrected(b2, state.count), 1)
    m = jax.tree.map(lambda g, m: b1_t * m + (1 - b1_t) * g, grads, state.m)
    v = jax.tree.map(lambda g, v: b2_t * v + (1 - b2_t) * jnp.square(g), grads, state.v)

    def step(path: KeyPath, m: jax.Array, v: jax.Array) -> jax.Array:
      u = m / (jnp.sqrt(v + epsilon_root) + epsilon)
      if update_clip > 0:
        # each layer of a repeated stack counts as a separate variable, as in Pax
        dims = range(layer_dims(path_name(path)), u.ndim)
        rms = jnp.sqrt(jnp.square(u).mean(tuple(dims), keepdims=True))
        u = u / jnp.maximum(1.0, rms / update_clip)
      return u

    return jax.tree_util.tree_map_with_path(step, m, v), PaxAdamState(
      state.count + jnp.asarray(valid, jnp.int32), m, v
    )

  return optax.GradientTransformationExtraArgs(init, update)


class ScheduleState(NamedTuple):
  count: jax.Array  # type: ignore[assignment]  # int32, completed updates


def scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformation:
  """Multiplies updates by −schedule(count); a skipped update is 0 and is not counted."""

  def init(params: PyTree) -> ScheduleState:
    del params
    return ScheduleState(jnp.zeros((), jnp.int32))

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, valid: Valid = True
  ) -> tuple[PyTree, ScheduleState]:
    del params
    learning_rate = jnp.where(valid, schedule(state.count), 0)
    scaled = jax.tree.map(lambda u: -learning_rate * u, updates)
    return scaled, ScheduleState(state.count + jnp.asarray(valid, jnp.int32))

  return optax.GradientTransformationExtraArgs(init, update)


class Skippable(optax.GradientTransformationExtraArgs):
  """A transformation with an update that takes `valid`, a boolean scalar.

  If it is False, the gradients are zeros, the updates are zeros too, and the state stays the same.
  """


def skippable(transformation: optax.GradientTransformation) -> Skippable:
  """Adds the argument `valid`, which Optimizer needs, to any optax transformation.

  This costs a pass over the updates and the state. The two transformations above avoid that pass:
  they put the choice into their scalars. A transformation that takes `valid` stays as it is.
  """
  if isinstance(transformation, Skippable):
    return transformation
  if 'valid' in inspect.signature(transformation.update).parameters:
    return Skippable(*transformation)

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, valid: Valid = True
  ) -> tuple[PyTree, PyTree]:
    new_updates, new_state = transformation.update(updates, state, params)
    updates = jax.tree.map(lambda u: jnp.where(valid, u, jnp.zeros_like(u)), new_updates)
    return updates, jax.tree.map(lambda n, o: jnp.where(valid, n, o), new_state, state)

  return Skippable(transformation.init, update)
