"""Checks what losses return, which users write."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlite.cli.user_code import place_of
from paxlite.core.errors import UserError
from paxlite.layers.sown import is_count, is_maximum
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Metrics, Weighted

_RESERVED = {
  'total_loss': 'the sum of all losses has',
  'step': 'the records of evaluations use',
  'input': 'the records of evaluations use',
}


def check_losses(losses: object) -> None:
  """Raises UserError if these are not the losses of a task, by names."""
  if not isinstance(losses, Mapping) or not losses:
    raise UserError(f'the losses of a task must be a dict of losses by name, not {losses!r}')
  for name, loss in losses.items():
    if not isinstance(loss, Loss):
      raise UserError(
        f'the loss {name!r} is {_described(loss)} and must be a paxlite.losses.loss.Loss'
      )
    _check_name(name, 'a task has a loss')
    if is_maximum(name) or is_count(name):
      raise UserError(
        f'a task has a loss named {name!r}: names with max_ or num_ are for metrics that are '
        'combined by maximum or sum; rename it'
      )


def checked_sum(name: str, loss: Loss, total: Any) -> jax.Array:
  """Returns the sum that a loss has returned; raises UserError if it is not one number."""
  if not hasattr(total, 'dtype') or total.shape or not jnp.issubdtype(total.dtype, jnp.floating):
    raise UserError(
      f'{_place(loss.__call__)} returns {_described(total)} for the loss {name!r}, and must return '
      'a scalar of a floating-point type: the sum over the batch, which is divided by weight(batch)'
    )
  return total.astype(jnp.float32)


def checked_weight(name: str, loss: Loss, weight: Any) -> jax.Array:
  """Returns the weight that a loss has returned; raises UserError if it is not one number."""
  if not _is_number(weight):
    raise UserError(
      f'{_place(loss.weight)} returns {_described(weight)} for the loss {name!r}, and must return '
      'a scalar that is not negative, such as the number of targets'
    )
  return jnp.asarray(weight, jnp.float32)


def check_distinct(metrics: Metrics, more: Collection[str], losses: Collection[str]) -> None:
  """Raises UserError if losses return two metrics of one name, or one with the name of a loss."""
  for name in more:
    if name in metrics or name in losses:
      raise UserError(f'{name!r} names two metrics, or a metric and a loss: rename one')


def checked_metrics(name: str, loss: Loss, metrics: Any, weight: jax.Array) -> Metrics:
  """Returns the metrics of a loss, each with its weight.

  Raises UserError if it is not a dict of scalars, or of Weighted of two scalars, by allowed names.

  Args:
    name: The name of the loss.
    metrics: What its method `metrics` has returned.
    weight: The weight of a metric that is a bare scalar.
  """
  where = f'{_place(loss.metrics)} of the loss {name!r}'
  if not isinstance(metrics, Mapping):
    raise UserError(f'{where} returns {_described(metrics)}, and must return a dict')
  return {key: _weighted(key, metric, weight, where) for key, metric in metrics.items()}


def _weighted(name: object, metric: Any, weight: jax.Array, where: str) -> Weighted:
  _check_name(name, f'{where} returns a metric')
  is_pair = isinstance(metric, tuple) and len(metric) == 2
  value, of_value = metric if is_pair else (metric, weight)
  for part in (value, of_value):
    if not _is_number(part):
      raise UserError(
        f'{where} returns {_described(part)} in the metric {name!r}: a metric is a scalar, or '
        'Weighted(value, weight) of two scalars'
      )
  return Weighted(*(jnp.asarray(x, jnp.float32) for x in (value, of_value)))


def _check_name(name: object, who: str) -> None:
  if not isinstance(name, str):
    raise UserError(f'{who} named {name!r}: a name must be a string')
  if name in _RESERVED:
    raise UserError(f'{who} named {name!r}, a name that {_RESERVED[name]}: rename it')


def _place(method: Any) -> str:
  return f'{place_of(method)}: {getattr(method, "__qualname__", method)}'


def _is_number(x: object) -> bool:
  if isinstance(x, bool | int | float):
    return True
  return hasattr(x, 'dtype') and getattr(x, 'shape', None) == ()


def _described(x: object) -> str:
  if hasattr(x, 'shape') and hasattr(x, 'dtype'):
    return f'an array {x.dtype}{list(x.shape)}'
  return 'None' if x is None else f'an object of the type {type(x).__name__}'
