"""The lines with which a run describes its training data before its first step."""

from typing import Any

from paxlite.data.base import Input, RowInput
from paxlite.data.mixture import MixtureInput
from paxlite.data.rows import TokenRows

_MOST_CHARS = 120  # of a name; a long list of files is cut


def lines(data: Input) -> list[str]:
  """Returns a line that describes an input, and one more for each part of a mixture."""
  name = f'Training data: {_shortened(data.name)}'
  if isinstance(data, RowInput):
    return [f'{name}: {_rows(data.source, data.batch_size)}']
  if isinstance(data, MixtureInput):
    total = sum(data.quotas)
    shares = [quota / total for quota in data.quotas]
    return [f'{name}: a mixture of {len(shares)}'] + [
      f'  {share:.1%} {_shortened(part.name)}' + _part(part, share * data.batch_size)
      for part, share in zip(data.parts, shares, strict=True)
    ]
  return [f'{name}: a stream, {data.batch_size:,} rows a step']


def _part(part: Any, rows_a_step: float) -> str:
  return f': {_rows(part.source, rows_a_step)}' if isinstance(part, RowInput) else ': a stream'


def _rows(source: Any, rows_a_step: float) -> str:
  """Describes the contents of a RowSource, as far as it knows them, and how long they last."""
  count, length = len(source), getattr(source, 'seq_len', None)
  contents = getattr(source, 'contents', '')
  if not contents and isinstance(source, TokenRows):
    contents = f'{len(source.seq_starts) - 1:,} documents, {len(source.tokens):,} tokens'
  rows = f'{count:,} row{"s" if count != 1 else ""}' + (f' of {length:,}' if length else '')
  held = f'{contents}, in {rows}' if contents else rows
  step = f'{_short(rows_a_step)} rows'
  if count < rows_a_step:
    times = _short(rows_a_step / count)
    return f'{held}; fewer than the {step} of a step, so each is read {times} times'
  return f'{held}; an epoch is {_short(count / rows_a_step)} steps of {step}'


def _short(number: float) -> str:
  return f'{number:,.0f}' if number >= 100 or number == int(number) else f'{number:.1f}'


def _shortened(name: str) -> str:
  return name if len(name) <= _MOST_CHARS else f'{name[:_MOST_CHARS]} …'
