"""An optimizer: an optax transformation, and the choice of the variables that it trains."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import LOAD_BIAS, REFERENCE, path_name
from paxlite.optim import moments, state_axes
from paxlite.optim.transformations import (
  Skippable,
  scale_by_learning_rate,
  scale_by_pax_adam,
  skippable,
)


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optax chain together with its schedule and the variables it trains.

  Where a field is None, an experiment fills in what its attributes say: see own_optimizer. Without
  an experiment, None means all variables, no cap, and moments on the devices.

  Attributes:
    transformation: Turns gradients into updates, including the learning rate. It is made
      `skippable`, so that an update whose gradients are not finite changes nothing.
    schedule: Learning rate by update count, for the summaries; None if it is not known.
    trainable: Regular expressions; a variable trains when one of them matches its full path
      ('transformer/x_layers_0/qkv/w'). Frozen variables get no gradient and no optimizer state.
    clip_gradient_norm: Cap on the global norm of the gradients that `transformation` gets; ≤ 0
      means no cap.
    on_host: Whether the moments are in the memory of the host between two updates.
    moments_dtype: The dtype that `transformation` keeps moments in: see moments.narrow.
    by_layer: Whether the layers of a repeated stack may be updated one by one, as moments.streamed
      does it, because each number is updated by itself.
    remarks: Sentences on values that contradict the attributes of an experiment.
  """

  transformation: optax.GradientTransformation
  schedule: optax.Schedule | None = None
  trainable: tuple[str, ...] | None = None
  clip_gradient_norm: float | None = None
  on_host: bool | None = None
  moments_dtype: str | None = None
  by_layer: bool = False
  remarks: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'transformation', skippable(self.transformation))

  def init(self, trainable: PyTree) -> PyTree:
    """Returns the first state for trainable parameters, boxed as they are with logical axes.

    Raises:
      UserError: It holds a random key of JAX's own type, which no checkpoint can hold.
    """
    state = self.transformation.init(state_axes.unboxed(trainable))
    for path, x in jax.tree_util.tree_leaves_with_path(state):
      if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        raise UserError(
          f'{path_name(path)} of the optimizer is a random key of its own type, which a checkpoint '
          'cannot hold: choose an optimizer without one'
        )
    return state_axes.boxed_like(trainable, state)

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
    names = {path_name(p) for p, _ in jax.tree.leaves_with_path(frozen, is_leaf=state_axes.is_box)}
    narrowed = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x
    one = lambda path, leaf: jax.tree.map(narrowed, leaf) if path_name(path) in names else leaf
    return jax.tree_util.tree_map_with_path(one, params, is_leaf=state_axes.is_box)

  @property
  def patterns(self) -> tuple[str, ...]:
    """Regular expressions of the trainable variables."""
    return ('.*',) if self.trainable is None else self.trainable

  @property
  def cap(self) -> float:
    """The cap on the global norm of the gradients; ≤ 0: none."""
    return self.clip_gradient_norm or 0.0

  def _matches(self, name: str) -> bool:
    is_reference = name.startswith(f'{REFERENCE}/')
    return not is_reference and any(re.fullmatch(p, name) for p in self.patterns)

  def clipped(self, norm: jax.Array) -> jax.Array:
    """Returns the gradients' global norm after clipping."""
    return jnp.minimum(norm, self.cap) if self.cap > 0 else norm

  def clip(self, grads: PyTree, norm: jax.Array, valid: jax.Array) -> PyTree:
    """Clips gradients, whose global norm is `norm`; returns zeros where `valid` is False.

    This is one product with a scalar, which XLA fuses into the code that reads the gradients.
    """
    cap = self.cap
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
      transformation = skippable(self.transformation)
      updates, state = transformation.update(grads, state, params, valid=valid)
      return optax.apply_updates(params, updates), state

    if self.on_host:
      move = moments.streamed if self.by_layer else moments.fetched
      return move(update, grads, opt_state, params)
    return update(grads, opt_state, params)

  def learning_rate(self, opt_state: PyTree, updates: jax.Array) -> jax.Array | None:
    """Returns the learning rate of the update that follows `opt_state`; None if it is not known.

    Args:
      opt_state: The state of `transformation`.
      updates: The number of updates so far, for a transformation that does not count them.
    """
    if self.schedule is None:
      return None
    counts = optax.tree.get_all_with_path(opt_state, 'count')
    return jnp.asarray(self.schedule(counts[0][1] if counts else updates))


def merge(trainable: PyTree, frozen: PyTree) -> PyTree:
  """Returns the parameters that `Optimizer.split` split into trainable and frozen ones."""
  return jax.tree.map(
    lambda t, f: f if t is None else t, trainable, frozen, is_leaf=lambda x: x is None
  )


def _select(params: PyTree, wanted: Callable[[str], bool]) -> PyTree:
  """Returns a tree like `params`, with None instead of variables whose names are not wanted."""
  one = lambda path, leaf: leaf if wanted(path_name(path)) else None
  return jax.tree_util.tree_map_with_path(one, params, is_leaf=state_axes.is_box)


def _is_load_bias(name: str) -> bool:
  return name.rpartition('/')[2] == LOAD_BIAS


def adam(
  schedule: optax.Schedule,
  b1: float = 0.9,
  b2: float = 0.99,
  epsilon: float = 1e-6,
  epsilon_root: float = 0.0,
  update_clip: float = 1.0,
  weight_decay: float = 1e-3,
  clip_gradient_norm: float = 5.0,
  trainable: Sequence[str] | None = None,
  moments_dtype: str | None = None,
  on_host: bool | None = None,
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
  patterns = None if trainable is None else tuple(trainable)
  return Optimizer(
    Skippable(*moments.narrow(optax.chain(*chain), moments_dtype or 'float32')),
    schedule,
    patterns,
    clip_gradient_norm,
    on_host,
    moments_dtype,
    by_layer=True,
  )
