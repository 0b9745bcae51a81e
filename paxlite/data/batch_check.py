"""Checks batches before they reach the devices, where a wrong id gives wrong results in silence."""

from collections.abc import Mapping

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Input

_INTEGERS = ('ids', 'labels', 'segment_ids', 'segment_pos')
_NEEDED = ('ids', 'labels', 'weights')
_OF_TOKENS = {*_INTEGERS, 'weights'}


def check(data: Input, batch: object, num_rows: int, max_segments: int) -> None:
  """Raises UserError if a model cannot be trained on a batch.

  Args:
    data: The input that has yielded it.
    num_rows: The rows that it must have.
    max_segments: The most segments of a packed row, padding included; 0: any number.
  """
  if what := problem(batch, num_rows, data.max_token_id):
    raise UserError(
      f'the data {data.name} yields {what}: a batch is a dict of arrays ids, labels and weights '
      f'[{num_rows}, T], whose ids and labels are from 0 to max_token_id'
    )
  if max_segments and isinstance(batch, Mapping) and 'segment_ids' in batch:
    ids = batch['segment_ids']
    most = 1 + (ids[:, 1:] != ids[:, :-1]).sum(1).max(initial=0)
    if most > max_segments:
      raise UserError(
        f'the data {data.name} has a sequence of {most} segments and padding, but '
        f'MAX_SEGMENTS_PER_SEQ is {max_segments}: set MAX_SEGMENTS_PER_SEQ={2 * most}'
      )


def problem(batch: object, num_rows: int, max_token_id: int) -> str:
  """Returns what is wrong with a batch; '' if nothing is.

  Args:
    batch: What an input has yielded: arrays [b, T], and [b, T, …] under other names.
    num_rows: The rows that it must have.
    max_token_id: The largest id that the input says it has.
  """
  if not isinstance(batch, Mapping):
    return f'an object of the type {type(batch).__name__} in place of a dict'
  missing = [name for name in _NEEDED if name not in batch]
  if missing:
    return f'no {" and no ".join(missing)}'
  for name, x in batch.items():
    if not hasattr(x, 'shape') or not hasattr(x, 'dtype'):
      return f'{name} of the type {type(x).__name__} in place of an array'
    # a loss of one's own may need arrays [b, T, …] of its own
    if x.shape[:1] != (num_rows,) or (name in _OF_TOKENS and x.ndim != 2):
      return f'{name} of shape {list(x.shape)}'
    if name in _INTEGERS and not np.issubdtype(x.dtype, np.integer):
      return f'{name} of the type {x.dtype} in place of integers'
  for name in _OF_TOKENS & batch.keys():
    if batch[name].shape != batch['ids'].shape:
      return (
        f'{name} of shape {list(batch[name].shape)} with ids of shape {list(batch["ids"].shape)}'
      )
  for name in ('ids', 'labels'):
    low, high = batch[name].min(initial=0), batch[name].max(initial=0)
    if low < 0:
      way_out = ' (the weight 0 leaves a target out, not a negative label)'
      return f'{name} of {low}{way_out if name == "labels" else ""}'
    if high > max_token_id:
      return f'{name} of {high}, and its max_token_id is {max_token_id}'
  return ''  # a step whose weights are not finite is skipped, and said
