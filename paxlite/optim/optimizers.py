"""Pax's Adam as an optax transformation, and the choice of the variables that it trains."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.tree_util import KeyPath

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import LOAD_BIAS, path_name
from paxlite.layers.transformer import REPEATED
from paxlite.optim import moments


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
) -> optax.GradientTransformation:
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

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, valid=True):
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
        dims = range(1 if REPEATED in path_name(path).split('/') else 0, u.ndim)
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

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, valid=True):
    del params
    learning_rate = jnp.where(valid, schedule(state.count), 0)
    scaled = jax.tree.map(lambda u: -learning_rate * u, updates)
    return scaled, ScheduleState(state.count + jnp.asarray(valid, jnp.int32))

  return optax.GradientTransformationExtraArgs(init, update)


def skippable(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
  """Adds the argument `valid`, which Optimizer needs, to any optax transformation.

  This costs a pass over the updates and the state. The two transformations above avoid that pass:
  they put the choice into their scalars.
  """

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, valid=True):
    new_updates, new_state = transformation.update(updates, state, params)
    updates = jax.tree.map(lambda u: jnp.where(valid, u, 0), new_updates)
    return updates, jax.tree.map(lambda n, o: jnp.where(valid, n, o), new_state, state)

  return optax.GradientTransformationExtraArgs(transformation.init, update)


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optax chain together with its schedule and the variables it trains.

  Attributes:
    transformation: Turns gradients into updates, including the learning rate. Its update takes
      `valid`, a boolean scalar. If it is False, the gradients are zeros, the updates must be zeros
      too, and the state must not change. `skippable` adds `valid` to other transformations.
    schedule: Learning rate by update count, for the summaries.
    trainable: Regular expressions; a variable trains when one of them matches its full path
      ('transformer/x_layers_0/qkv/w'). Frozen variables get no gradient and no optimizer state.
    clip_gradient_norm: Cap on the global norm of the gradients that `transformation` gets; ≤ 0
      means no cap.
    on_host: Whether the moments are in the memory of the host: see moments.streamed.
  """

  transformation: optax.GradientTransformationExtraArgs
  schedule: optax.Schedule
  trainable: tuple[str, ...] = ('.*',)
  clip_gradient_norm: float = 0.0
  on_host: bool = False

  def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (trainable, frozen): trees like `params`, with None where the other has the leaf."""

    trains = lambda name: self._matches(name) and not _is_load_bias(name)
    return _select(params, trains), _select(params, lambda name: not trains(name))

  def split_load_biases(self, frozen: PyTree) -> tuple[PyTree, PyTree]:
    """Splits frozen variables into biases for the load of experts, and all others.

    A step moves the former by a rule: group_router.balanced. They are the variables with the name
    LOAD_BIAS that `trainable` matches; others with this name stay as they are.
    """
    moves = lambda name: self._matches(name) and _is_load_bias(name)
    return _select(frozen, moves), _select(frozen, lambda name: not moves(name))

  def with_frozen_as(self, params: PyTree, dtype: str) -> PyTree:
    """Returns parameters with the frozen ones of float32 in another dtype."""
    _, others = self.split(params)
    _, frozen = self.split_load_biases(others)
    names = {path_name(p) for p, _ in jax.tree.leaves_with_path(frozen, is_leaf=_is_box)}
    narrowed = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x
    one = lambda path, leaf: jax.tree.map(narrowed, leaf) if path_name(path) in names else leaf
    return jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_box)

  def _matches(self, name: str) -> bool:
    return any(re.fullmatch(p, name) for p in self.trainable)

  def clipped(self, norm: jax.Array) -> jax.Array:
    """Returns the gradients' global norm after clipping."""
    return jnp.minimum(norm, self.clip_gradient_norm) if self.clip_gradient_norm > 0 else norm

  def clip(self, grads: PyTree, norm: jax.Array, valid: jax.Array) -> PyTree:
    """Clips gradients, whose global norm is `norm`; returns zeros where `valid` is False.

    This is one product with a scalar, which XLA fuses into the code that reads the gradients.
    """
    cap = self.clip_gradient_norm
    if cap <= 0:
      return jax.tree.map(lambda g: jnp.where(valid, g, 0), grads)
    scale = jnp.where(norm > cap, cap / norm, 1)  # float32, and with it the product
    return jax.tree.map(lambda g: jnp.where(valid, (g * scale).astype(g.dtype), 0), grads)

  def update(
    self, grads: PyTree, norm: jax.Array, valid: jax.Array, opt_state: PyTree, params: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Clips gradients, and returns the next trainable parameters and the next state.

    Args:
      grads: The gradients.
      norm: Their global norm.
      valid: Whether they are finite; if not, nothing changes.
      opt_state: The state of `transformation`.
      params: The trainable parameters.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
      grads = self.clip(grads, norm, valid)
      updates, state = self.transformation.update(grads, state, params, valid=valid)
      return optax.apply_updates(params, updates), state

    if self.on_host:
      return moments.streamed(update, grads, opt_state, params)
    return update(grads, opt_state, params)

  def learning_rate(self, opt_state: PyTree) -> jax.Array:
    """Returns the learning rate of the update that follows `opt_state`."""
    counts = optax.tree.get_all_with_path(opt_state, 'count')
    return jnp.asarray(self.schedule(counts[0][1]))


def merge(trainable: PyTree, frozen: PyTree) -> PyTree:
  """Returns the parameters that `Optimizer.split` split into trainable and frozen ones."""
  return jax.tree.map(
    lambda t, f: f if t is None else t, trainable, frozen, is_leaf=lambda x: x is None
  )


def _select(params: PyTree, wanted: Callable[[str], bool]) -> PyTree:
  """Returns a tree like `params`, with None instead of variables whose names are not wanted."""
  one = lambda path, leaf: leaf if wanted(path_name(path)) else None
  return jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_box)


def _is_load_bias(name: str) -> bool:
  return name.rpartition('/')[2] == LOAD_BIAS


def _is_box(x: object) -> bool:
  return isinstance(x, nn.meta.AxisMetadata)


def adam(
  schedule: optax.Schedule,
  b1: float = 0.9,
  b2: float = 0.99,
  epsilon: float = 1e-6,
  epsilon_root: float = 0.0,
  update_clip: float = 1.0,
  weight_decay: float = 1e-3,
  clip_gradient_norm: float = 5.0,
  trainable: Sequence[str] = ('.*',),
  moments_dtype: str = 'float32',
  on_host: bool = False,
) -> Optimizer:
  """Returns Pax's Adam: clip the global norm, Adam, decay all trainable variables, scale by −lr.

  Optimizer.clip does the clipping; `transformation` by itself does not clip.

  Args:
    schedule: Learning rate by update count.
    b1, b2, epsilon, epsilon_root, update_clip: The arguments of scale_by_pax_adam.
    weight_decay: This factor times a variable is added to its update, also for biases, norms and
      embeddings.
    clip_gradient_norm: Cap on the global norm of the gradients; ≤ 0 means no cap.
    trainable: Regular expressions of the trainable variables: see Optimizer.
    moments_dtype: The dtype of the moments between two updates: see moments.narrow.
    on_host: Whether the moments are in the memory of the host: see moments.streamed.
  """
  chain: list[optax.GradientTransformation] = []
  if clip_gradient_norm > 0:
    chain.append(optax.identity())  # checkpoints have an entry for the clipping
  chain += [
    scale_by_pax_adam(b1, b2, epsilon, epsilon_root, update_clip),
    optax.add_decayed_weights(weight_decay),
    scale_by_learning_rate(schedule),
  ]
  transformation = moments.narrow(optax.chain(*chain), moments_dtype)
  return Optimizer(transformation, schedule, tuple(trainable), clip_gradient_norm, on_host)
