"""The lines about its data that a run prints first."""

import math
from collections.abc import Sequence

import numpy as np

from paxlite.core.foreign_text import printable
from paxlite.core.round_numbers import round_up
from paxlite.core.wording import amount
from paxlite.core.wording import number as short
from paxlite.data import packaged
from paxlite.data.base import Input, OnPolicyInput, RowInput, RowSource
from paxlite.data.example_rows import ExampleRows
from paxlite.data.mixture import MixtureInput
from paxlite.data.rows import TokenRows
from paxlite.data.tokenizer import Tokenizer

_MOST_CHARS = 120  # of a name; a long list of files is cut
_MOST_TOKENS = 300  # of the example that a run prints
_BUCKETS = 10
_BAR = 40  # characters of the longest bar


def lines(data: Input) -> list[str]:
  """Returns a line that describes an input, one more for each source of a mixture, and warnings."""
  return [*_described(data), *warnings(data)]


def warnings(data: Input) -> list[str]:
  """Returns what a person should know of the data before a model learns them, a line each."""
  found = [line for source in _sources(data) for line in getattr(source, 'warnings', ())]
  return list(dict.fromkeys(found))


def thinking(data: Input) -> bool | None:
  """Returns False if answers follow prompts without thinking; None: as the chat template has it."""
  found = {source.thinking for source in _sources(data) if isinstance(source, ExampleRows)}
  return False if found == {False} else None


def _sources(data: Input) -> list[object]:
  if isinstance(data, MixtureInput):
    return [source for each in data.inputs for source in _sources(each)]
  return [getattr(data, 'source', None)]


def _described(data: Input) -> list[str]:
  name = f'Training data: {_shortened(data.name)}'
  if isinstance(data, RowInput):
    return [f'{name}: {_rows(data.source, data.batch_size)}']
  if isinstance(data, MixtureInput):
    total = sum(data.quotas)
    shares = [quota / total for quota in data.quotas]
    return [f'{name}: a mixture of {len(shares)}'] + [
      f'  {share:.1%} {_shortened(each.name)}: '
      + (_rows(each.source, share * data.batch_size) if isinstance(each, RowInput) else 'a stream')
      for each, share in zip(data.inputs, shares, strict=True)
    ]
  if isinstance(data, OnPolicyInput):
    return [
      f'{name}: generated with the newest parameters, {amount(data.batch_size, "row")} a step'
    ]
  return [f'{name}: a stream, {amount(data.batch_size, "row")} a step']


def _rows(source: RowSource, rows_a_step: float) -> str:
  """Describes the contents of a RowSource, as far as it knows them, and how long they last."""
  count, length = len(source), getattr(source, 'seq_len', None)
  contents = getattr(source, 'contents', '')
  rows = f'{amount(count, "row")}' + (f' of {length:,}' if length else '')
  if isinstance(source, ExampleRows):
    contents = examples(source)
    rows += f', {share_filled(source):.0%} full'
  elif not contents and isinstance(source, TokenRows):
    contents = f'{len(source.seq_starts) - 1:,} documents, {len(source.tokens):,} tokens'
  held = f'{contents}, in {rows}' if contents else rows
  return f'{held}; {epoch(count, rows_a_step)}'


def epoch(rows: int, rows_a_step: float) -> str:
  """Describes the steps of an epoch, or how often a step reads a row."""
  step = amount(rows_a_step, 'row')
  if rows < rows_a_step:
    times = short(rows_a_step / rows)
    return f'fewer than the {step} of a step, so each is read {times} times'
  return f'an epoch is {amount(rows / rows_a_step, "step")} of {step}'


def examples(source: ExampleRows) -> str:
  """Returns the numbers of examples and tokens, and of what is too long."""
  parts = [
    f'{amount(source.num_records, source.noun)}, {source.lengths.sum():,} tokens',
    f'{source.num_learned:,} of them learned',
    f'the longest {source.lengths.max():,}',
  ]
  parts += [f'{source.num_cut:,} cut'] if source.num_cut else []
  parts += [f'{source.num_skipped:,} left out'] if source.num_skipped else []
  return ', '.join(parts)


def share_filled(source: ExampleRows) -> float:
  """Returns the share of the tokens of rows that examples fill."""
  return source.lengths.sum() / (len(source) * source.seq_len)


def histogram(lengths: np.ndarray) -> list[str]:
  """Returns a line with a bar for each range of lengths; the last takes the longest 1%."""
  low, high = int(lengths.min()), int(np.quantile(lengths, 0.99, method='higher'))
  step = round_up((high - low + 1) / _BUCKETS)
  edges = list(range(low // step * step, high + 1, step))
  counts = np.bincount(np.searchsorted(edges, lengths, side='right') - 1, minlength=len(edges))
  ranges = [f'{edge:,} to {edge + step - 1:,}' if step > 1 else f'{edge:,}' for edge in edges]
  if lengths.max() >= edges[-1] + step:
    ranges[-1] = f'{edges[-1]:,} and more'
  width = max(map(len, ranges))
  bars = ['#' * math.ceil(_BAR * int(count) / int(counts.max())) for count in counts]
  return [
    f'{name:>{width}}  {bar}{" " * bool(bar)}{count:,}'
    for name, bar, count in zip(ranges, bars, counts, strict=True)
  ]


def first_look(source: ExampleRows, color: bool) -> list[str]:
  """Returns lines on the examples of a new run: how long they are, and the first one."""
  return [
    'Examples by number of tokens:', *(f'  {line}' for line in histogram(source.lengths)),
    f'The first example, {how_learned(color)}:', example_text(source, 0, color, _MOST_TOKENS),
  ]  # fmt: skip


def how_learned(color: bool) -> str:
  """Describes how example_text and masked_text mark learned text."""
  return f'{"in green" if color else "in [[ ]]"} what is learned'


def example_text(source: ExampleRows, number: int, color: bool, most: int) -> str:
  """Returns the text of at most `most` tokens of an example."""
  example = source.example(number)
  text = masked_text(source.tokenizer, example.ids[:most], example.is_answer[:most], color)
  return text if len(example.ids) <= most else f'{text} …'


def masked_text(
  tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, is_learned: np.ndarray, color: bool
) -> str:
  """Returns the text of ids [n], with what is learned in green, or in [[ ]] without color.

  Special tokens are spelled out, and control characters, which could change a terminal, escaped.
  """
  before, after = ('\x1b[32m', '\x1b[0m') if color else ('[[', ']]')
  ends = np.flatnonzero(np.diff(is_learned)) + 1
  pieces = zip(np.split(np.asarray(ids), ends), np.split(is_learned, ends), strict=True)
  text_of = lambda part: printable(tokenizer.decode_marked(part.tolist()))
  texts = [(text_of(part), here[0]) for part, here in pieces]
  return ''.join(f'{before}{text}{after}' if here else text for text, here in texts)


def _shortened(name: str) -> str:
  name = name.replace(f'{packaged.FOLDER}/', '')
  return name if len(name) <= _MOST_CHARS else f'{name[:_MOST_CHARS]} …'
