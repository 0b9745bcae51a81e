"""Completes an optimizer that a user has written by what the attributes of the experiment say."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import optax

from paxlite.core import own_code
from paxlite.core.errors import UserError, line_of
from paxlite.core.trees import PyTree
from paxlite.optim import moments
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.transformations import Skippable, skippable


def completed(
  optimizer: object,
  experiment: str,
  schedule: optax.Schedule | None,
  trainable: Sequence[str],
  clip_gradient_norm: float,
  moments_dtype: str,
  on_host: bool,
) -> Optimizer:
  """Returns the optimizer with clipping, trainable variables, and moments as an experiment says.

  A value that an Optimizer states itself stays, and a sentence in its remarks says so.

  Args:
    optimizer: An Optimizer, or an optax transformation.
    experiment: The dotted path of the experiment, for messages.
    schedule: Learning rate by update count, as far as it is known, for an optax transformation.
    trainable: TRAINABLE_VARIABLES.
    clip_gradient_norm: CLIP_GRADIENT_NORM_TO_VALUE.
    moments_dtype: ADAM_MOMENTS_DTYPE.
    on_host: OFFLOAD_OPTIMIZER.

  Raises:
    UserError: It is neither.
  """
  if isinstance(optimizer, optax.GradientTransformation):
    optimizer = Optimizer(optimizer, schedule)
  if not isinstance(optimizer, Optimizer):
    raise UserError(
      f'the optimizer of {experiment} is built as a {type(optimizer).__name__}, and must be an '
      'optax transformation or a paxlite.optim.optimizers.Optimizer'
    )
  values: dict[str, Any] = {
    'trainable': ('TRAINABLE_VARIABLES', tuple(trainable)),
    'clip_gradient_norm': ('CLIP_GRADIENT_NORM_TO_VALUE', max(clip_gradient_norm, 0.0)),
    'on_host': ('OFFLOAD_OPTIMIZER', on_host),
    'moments_dtype': ('ADAM_MOMENTS_DTYPE', moments_dtype),
  }
  stated = {field: getattr(optimizer, field) for field in values}
  changes = {field: values[field][1] for field, own in stated.items() if own is None}
  remarks = [
    f'The optimizer of {experiment} itself states {field}={own!r}: '
    f'{values[field][0]} has no effect.'
    for field, own in stated.items()
    if own is not None and own != values[field][1]
  ]
  narrowed = moments_dtype if optimizer.moments_dtype is None else 'float32'
  transformation = moments.narrow(optimizer.transformation, narrowed)
  return dataclasses.replace(
    optimizer,
    transformation=_explained(Skippable(*transformation), experiment),
    remarks=(*optimizer.remarks, *remarks),
    **changes,
  )


def _explained(transformation: optax.GradientTransformation, experiment: str) -> Skippable:
  """Turns errors of a transformation of optax, as of one that needs a loss function, into one line.

  An error in a line of the user's own stays as it is.
  """
  inner = skippable(transformation)

  @contextlib.contextmanager
  def explaining(what: str) -> Iterator[None]:
    try:
      yield
    except UserError:
      raise
    except Exception as e:
      if own_code.frame_of(e) is not None:
        raise
      raise UserError(
        f'the optimizer of {experiment} cannot {what}: {type(e).__name__}: {line_of(e)}'
      ) from e

  def init(params: PyTree) -> PyTree:
    with explaining('make its state for the trainable variables'):
      return inner.init(params)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, valid=True):
    with explaining('update the trainable variables'):
      return inner.update(updates, state, params, valid=valid)

  return Skippable(init, update)
