"""An optimizer: an optax transformation, and what holds for every one of them."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from paxlite import extensions
from paxlite.cli import user_code
from paxlite.core.errors import UserError, line_of
from paxlite.core.training_rules import is_never_trained, rule_of
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REFERENCE, path_name
from paxlite.optim import moments, state_axes, variable_groups
from paxlite.optim.averaging import Averaged, of_evaluation
from paxlite.optim.per_layer import per_layer
from paxlite.optim.transformations import Skippable, skippable
from paxlite.parallel import weight_dims
from paxlite.parallel.quantized_weights import is_quantized


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optax transformation, with its schedule, the variables it trains, and how they are updated.

  Raises UserError if `transformation` is no optax transformation.
  """

  # Turns gradients into updates, including the learning rate. An update whose gradients are not
  # finite changes nothing: see `skippable`. Each layer of a repeated stack is a variable of its
  # own: see `per_layer`.
  transformation: optax.GradientTransformation
  # learning rate by update count, for the summaries; None if it is not known
  schedule: optax.Schedule | None = None
  # Regular expressions; a variable trains when one of them matches its full path
  # ('transformer/x_layers_0/qkv/w'). Frozen variables get no gradient and no optimizer state.
  trainable: Sequence[str] = ('.*',)
  # factors of the learning rates of some variables, 'PATTERN=FACTOR': see variable_groups
  rate_factors: Sequence[str] = ()
  # cap on the global norm of the gradients that `transformation` gets; ≤ 0 means no cap
  clip_gradient_norm: float = 0.0
  on_host: bool = False  # whether the moments are in the memory of the host between two updates
  moments_dtype: str = 'float32'  # the dtype that moments are kept in: see moments.narrow
  # share that stays of an exponential moving average of the weights at an update; 0 means no
  # average
  average_decay: float = 0.0
  # whether the layers of a repeated stack may be updated one by one, as moments.streamed does it,
  # because each number is updated by itself
  by_layer: bool = False

  def __post_init__(self) -> None:
    if not isinstance(self.transformation, optax.GradientTransformation):
      made = type(self.transformation).__name__  # type: ignore[unreachable]
      raise UserError(f'transformation() makes a {made}, and must make an optax transformation')

  @functools.cached_property
  def _rate_factors(self) -> variable_groups.Factors:
    return variable_groups.parsed(self.rate_factors, 'LEARNING_RATE_FACTORS')

  @functools.cached_property
  def _wrapped(self) -> Skippable:
    """The transformation with moments in their dtype, which can skip an update."""
    is_known = self.by_layer or isinstance(self.transformation, Skippable)
    plain = skippable(self.transformation if is_known else per_layer(self.transformation))
    if self.moments_dtype == 'int8':
      return Skippable(*extensions.hook('ADAM_MOMENTS_DTYPE')(plain))
    return Skippable(*moments.narrow(plain, self.moments_dtype))

  def init(self, trainable: PyTree) -> PyTree:
    """Returns the first state for trainable parameters, boxed as they are with logical axes.

    Raises UserError if it holds a random key of JAX's own type, which no checkpoint can hold, or no
    variable has a learning rate of its own that an expression asks for.
    """
    names = list(state_axes.named(trainable))
    variable_groups.check(self._rate_factors, names, 'LEARNING_RATE_FACTORS')
    with _explained('make its state for'), weight_dims.declared(lambda: trainable):
      params = state_axes.unboxed(trainable)
      state = self._wrapped.init(params)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
      if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        raise UserError(
          f'{path_name(path)} of the optimizer is a typed random key, which a checkpoint cannot '
          'hold: choose an optimizer without one'
        )
    if self.average_decay:
      state = Averaged.of(state, params)
    return state_axes.boxed_like(trainable, state)

  def check(self, params: PyTree) -> None:
    """Raises UserError unless `trainable` names variables of a model that can be trained.

    Args:
      params: The parameters, or their shapes.
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in self.trainable:
      if not any(re.fullmatch(pattern, name) for name in names):
        raise UserError(
          f'TRAINABLE_VARIABLES: {pattern!r} matches no whole variable name, such as '
          f'{", ".join(names[:3])} …'
        )
    trained = self.split(params)[0]
    for path, like in jax.tree_util.tree_leaves_with_path(trained):
      if not jnp.issubdtype(like.dtype, jnp.floating):
        raise UserError(
          f'TRAINABLE_VARIABLES trains {path_name(path)}, but FROZEN_DTYPE keeps it as '
          f'{like.dtype}, which is for frozen weights: USE_LORA=True'
        )
    if not jax.tree.leaves(trained):
      raise UserError(
        f'TRAINABLE_VARIABLES={list(self.trainable)} trains nothing: name other variables, or '
        'leave it out'
      )

  def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (trainable, frozen): trees like `params`, with None where the other has the leaf."""
    by_gradient = lambda name: not is_never_trained(name) and rule_of(name) is None
    return _split(params, lambda name: self._matches(name) and by_gradient(name))

  def split_ruled(self, frozen: PyTree) -> tuple[PyTree, PyTree]:
    """Splits frozen variables into those that a rule moves in each step, and all others.

    The former are variables that `trainable` matches: see core/training_rules.py.
    """
    return _split(frozen, lambda name: self._matches(name) and rule_of(name) is not None)

  def with_frozen_as(self, params: PyTree, dtype: str) -> PyTree:
    """Returns parameters with frozen float32 ones in another dtype, but for quantized ones."""
    _, others = self.split(params)
    _, frozen = self.split_ruled(others)
    names = {path_name(p) for p, _ in jax.tree.leaves_with_path(frozen, is_leaf=state_axes.is_box)}
    narrowed = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x
    is_narrowed = lambda path, leaf: path_name(path) in names and not is_quantized(leaf)
    one = lambda path, leaf: jax.tree.map(narrowed, leaf) if is_narrowed(path, leaf) else leaf
    return jax.tree_util.tree_map_with_path(one, params, is_leaf=state_axes.is_box)

  def _matches(self, name: str) -> bool:
    is_reference = name.startswith(f'{REFERENCE}/')
    return not is_reference and any(re.fullmatch(p, name) for p in self.trainable)

  def clipped(self, norm: jax.Array) -> jax.Array:
    """Returns the gradients' global norm after clipping."""
    cap = self.clip_gradient_norm
    return jnp.minimum(norm, cap) if cap > 0 else norm

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
      opt_state: The state that `init` or this function has returned.
      params: The trainable parameters.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
      grads = self.clip(grads, norm, valid)
      before = state.optimizer if isinstance(state, Averaged) else state
      with _explained('update'):
        updates, after = self._wrapped.update(grads, before, params, valid=valid)
      updates = variable_groups.scaled(updates, self._rate_factors)
      params = optax.apply_updates(params, updates)
      if isinstance(state, Averaged):
        after = state.updated(after, params, self.average_decay, valid)
      return params, after

    if self.on_host:
      move = moments.streamed if self.by_layer else moments.fetched
      return move(update, grads, opt_state, params)
    return update(grads, opt_state, params)

  def evaluated(self, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters to evaluate: where there is an average of the weights, with that."""
    if not self.average_decay:
      return params
    trainable, others = self.split(params)
    return moments.merged(of_evaluation(opt_state, trainable), others)

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


def _split(params: PyTree, first: Callable[[str], bool]) -> tuple[PyTree, PyTree]:
  select = lambda wanted: moments.selected(params, lambda name, _: first(name) == wanted)
  return select(True), select(False)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
  """Turns an error of optax, as of a transformation that needs a loss function, into one line.

  An error in a line of the user's own stays as it is.
  """
  try:
    yield
  except UserError:
    raise
  except Exception as e:
    if user_code.frame_of(e) is not None:
      raise
    raise UserError(
      f'the optimizer cannot {what} the trainable variables: {type(e).__name__}: {line_of(e)}'
    ) from e
