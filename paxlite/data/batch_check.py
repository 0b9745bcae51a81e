"""Checks batches before they reach the devices, where a wrong id gives wrong results in silence."""

from collections.abc import Mapping

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Input

_INTEGERS = ('ids', 'labels', 'segment_ids', 'segment_pos')
_NEEDED = ('ids', 'labels', 'weights')


def check(data: Input, batch: object, num_rows: int, max_texts: int) -> None:
  """Raises UserError if a batch is none that a model can be trained on.

  Args:
    data: The input that has yielded it.
    batch: The batch.
    num_rows: The rows that it must have.
    max_texts: The most texts of a packed row, padding included; 0: any number.
  """
  if what := problem(batch, num_rows, data.max_token_id):
    raise UserError(
      f'the data {data.name} yields {what}: a batch is a dict of ids, labels and weights, NumPy '
      f'arrays [{num_rows}, T], with ids that are token ids'
    )
  if max_texts and isinstance(batch, Mapping) and 'segment_ids' in batch:
    ids = batch['segment_ids']
    most = 1 + (ids[:, 1:] != ids[:, :-1]).sum(1).max(initial=0)
    if most > max_texts:
      raise UserError(
        f'the data {data.name} has a row of {most} texts and padding, and MAX_TEXTS_PER_ROW is '
        f'{max_texts}: --fdl.MAX_TEXTS_PER_ROW={2 * most}, or 0 for any number'
      )


def problem(batch: object, num_rows: int, max_token_id: int) -> str:
  """Returns what is wrong with a batch; '' if nothing is.

  Args:
    batch: What an input has yielded.
    num_rows: The rows that it must have.
    max_token_id: The largest id that the input says it has.
  """
  if not isinstance(batch, Mapping):
    return f'an object of the type {type(batch).__name__} in place of a dict'
  missing = [name for name in _NEEDED if name not in batch]
  if missing:
    return f'no {" and no ".join(missing)}'
  for name, x in batch.items():
    if not isinstance(x, np.ndarray):
      return f'{name} of the type {type(x).__name__} in place of a NumPy array'
    if x.shape != (num_rows, *batch['ids'].shape[1:2]):
      return f'{name} of shape {list(x.shape)}'
    if name in _INTEGERS and not np.issubdtype(x.dtype, np.integer):
      return f'{name} of the type {x.dtype} in place of integers'
  for name in ('ids', 'labels'):
    low, high = batch[name].min(initial=0), batch[name].max(initial=0)
    if low < 0:
      return f'{name} of {low} (a target that is not learned has the weight 0, and any id)'
    if high > max_token_id:
      return f'{name} of {high}, and its max_token_id is {max_token_id}'
  return ''  # a step whose weights are not finite is skipped, and said
