"""What a loss that overrides Task.loss returns: its check, and its mean over microbatches."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from paxlite.core.errors import UserError
from paxlite.core.own_code import place_of
from paxlite.core.trees import PyTree
from paxlite.training.metrics import Metrics, Weighted

_OF_RECORDS = ('step', 'input')


def completed(
  found: object, loss: Callable[..., object], weight: jax.Array, num_predictions: jax.Array
) -> tuple[jax.Array, Metrics]:
  """Returns the loss and the metrics that a loss of one's own has returned.

  The value of the metric `total_loss` becomes the loss itself, and its weight stays. If there is
  none, it is added with `weight`. So is num_predictions. A metric that is a bare scalar gets the
  weight of `total_loss`.

  Args:
    found: What the loss has returned.
    loss: The loss, for messages.
    weight: The weight of this batch in a mean over batches, unless the loss states another one.
    num_predictions: The number of target tokens.

  Raises:
    UserError: It is not a pair of a scalar and a dict of metrics.
  """
  where = f'{place_of(loss)}: {getattr(loss, "__qualname__", loss)}'
  if not isinstance(found, tuple) or len(found) != 2:
    raise UserError(
      f'{where} returns {_described(found)}, and must return a pair of the loss and a dict of '
      'metrics: return loss, {}'
    )
  value, metrics = found
  if not _is_scalar(value):
    raise UserError(
      f'{where} returns {_described(value)} as the loss, which must be a scalar of a '
      'floating-point type, such as a mean'
    )
  if not isinstance(metrics, Mapping):
    raise UserError(f'{where} returns {_described(metrics)} as the metrics, which must be a dict')
  stated: Any = metrics.get('total_loss')
  if _is_pair(stated):
    weight = stated[1]
  checked = {name: _weighted(name, m, weight, where) for name, m in metrics.items()}
  checked.setdefault('num_predictions', Weighted(num_predictions, jnp.ones(())))
  total = Weighted(value, jnp.asarray(weight, jnp.float32))
  return value, {**checked, 'total_loss': total}


def _weighted(name: object, metric: Any, weight: jax.Array, where: str) -> Weighted:
  """Returns a metric as Weighted; raises UserError if it is neither that nor a scalar."""
  if not isinstance(name, str):
    raise UserError(f'{where} returns a metric named {name!r}: a name must be a string')
  if name in _OF_RECORDS:
    raise UserError(
      f'{where} returns a metric named {name!r}, which the records of evaluations use: rename it'
    )
  value, of_value = metric if _is_pair(metric) else (metric, weight)
  for part in (value, of_value):
    if not _is_number(part):
      raise UserError(
        f'{where} returns {_described(part)} in the metric {name!r}: a metric is a scalar, or '
        'Weighted(value, weight) of two scalars'
      )
  return Weighted(*(jnp.asarray(x, jnp.float32) for x in (value, of_value)))


def _is_pair(metric: object) -> bool:
  return isinstance(metric, tuple) and len(metric) == 2


def _is_number(x: object) -> bool:
  if isinstance(x, bool | int | float):
    return True
  return hasattr(x, 'dtype') and getattr(x, 'shape', None) == ()


def _is_scalar(x: Any) -> bool:
  """Whether x is an array without dimensions that has a gradient."""
  return hasattr(x, 'dtype') and x.shape == () and jnp.issubdtype(x.dtype, jnp.floating)


def _described(x: object) -> str:
  if hasattr(x, 'shape') and hasattr(x, 'dtype'):
    return f'an array {x.dtype}{list(x.shape)}'
  if isinstance(x, tuple):
    return f'a tuple of {len(x)}'
  return 'None' if x is None else f'a {type(x).__name__}'


class RunningMean(NamedTuple):
  """The weighted mean of trees that arrive one after another.

  A tree of weight 0 does not count, even if it is not finite: a mean over no token is 0 / 0. If all
  have weight 0, they count equally.

  Attributes:
    mean: The mean of the trees so far.
    weight: The sum of their weights.
    number: Their number.
  """

  mean: PyTree
  weight: jax.Array
  number: jax.Array

  @classmethod
  def of(cls, zeros: PyTree) -> Self:
    """Returns the mean of no tree yet; `zeros` has the shapes and dtypes of the mean."""
    return cls(zeros, jnp.zeros(()), jnp.zeros(()))

  def with_part(self, tree: PyTree, weight: jax.Array) -> Self:
    """Returns the mean with one more tree."""
    number, total = self.number + 1, self.weight + weight
    share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 1 / number)

    def one(mean: jax.Array, x: jax.Array) -> jax.Array:
      x = x.astype(mean.dtype)
      moved = mean + share.astype(mean.dtype) * (x - mean)
      return jnp.where(share == 0, mean, jnp.where(share == 1, x, moved))

    return type(self)(jax.tree.map(one, self.mean, tree), total, number)
