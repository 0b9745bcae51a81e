"""What a run sees of its data: in lines that it prints first, and at length for tools.data."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from paxlite.core.foreign_text import printable
from paxlite.core.round_numbers import round_up
from paxlite.core.wording import amount
from paxlite.core.wording import number as short
from paxlite.data import packaged
from paxlite.data.base import Input, OnPolicyInput, RowInput, RowSource
from paxlite.data.example_rows import ExampleRows
from paxlite.data.mixture import MixtureInput
from paxlite.data.records import share_done
from paxlite.data.rows import TokenRows
from paxlite.data.stream_rows import Example
from paxlite.data.streams import Examples, StreamInput
from paxlite.data.tokenizer import Tokenizer

_MOST_CHARS = 120  # of a name; a long list of files is cut
_MOST_DOCUMENTS = 100_000  # of a stream, or of a large file of tokens, that are looked at
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
    rows += f', {_share_filled(source):.0%} full'
  elif not contents and isinstance(source, TokenRows):
    contents = f'{len(source.seq_starts) - 1:,} documents, {len(source.tokens):,} tokens'
  held = f'{contents}, in {rows}' if contents else rows
  return f'{held}; {epoch(count, rows_a_step)}'


def epoch(rows: int, rows_a_step: float) -> str:
  """Says how many steps an epoch has, or how often a row is read in a step."""
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


def _share_filled(source: ExampleRows) -> float:
  return source.lengths.sum() / (len(source) * source.seq_len)


@dataclasses.dataclass(frozen=True)
class Contents:
  """The documents or examples of an input, and the rows that they fill.

  Attributes:
    noun: What they are called, in the singular.
    lengths: Number of tokens of each [n].
    num_learned: Number of tokens that are learned.
    num_rows: Number of rows.
    fill: Share of the rows' tokens that are targets.
    is_whole: Whether this is all of the input.
    share: How much of the input this is, roughly; None: not known.
  """

  noun: str
  lengths: np.ndarray
  num_learned: int
  num_rows: int
  fill: float
  is_whole: bool = True
  share: float | None = 1.0


def contents_of(data: RowInput | StreamInput) -> Contents:
  """Returns the contents of an input. Of a long stream, only the first documents are read."""
  if isinstance(data, StreamInput):
    return _contents_of_stream(data)
  source = data.source
  if isinstance(source, ExampleRows):
    lengths, learned = source.lengths, source.num_learned
    return Contents(source.noun, lengths, learned, len(source), _share_filled(source))
  assert isinstance(source, TokenRows)
  starts = np.asarray(source.seq_starts[: _MOST_DOCUMENTS + 1]).astype(np.int64)
  lengths = np.diff(starts)
  count, tokens = len(source.seq_starts) - 1, len(source.tokens)
  fill = tokens / (len(source) * source.seq_len)
  if source.rows == 'sequences':  # the only rows that cut documents
    fill = float(np.minimum(lengths, source.seq_len).mean() / source.seq_len)
    tokens = round(fill * len(source) * source.seq_len)
  is_whole = count <= _MOST_DOCUMENTS
  return Contents(getattr(source, 'noun', 'document'), lengths, tokens, len(source), fill, is_whole)


def _contents_of_stream(data: StreamInput) -> Contents:
  lengths: list[int] = []
  num_rows = num_targets = num_learned = 0
  datasets = data.source.datasets
  for dataset, shard in [(d, shard) for d in datasets for shard in range(d.num_shards)]:
    measuring = _Measuring(dataset, lengths)
    for row, _ in data.rows_of(measuring, shard, epoch=None):
      num_rows += 1
      num_targets += int((row['segment_ids'] > 0).sum())
      num_learned += int((row['weights'] > 0).sum())
      if len(lengths) >= _MOST_DOCUMENTS:
        sources = [source for d in datasets for source in getattr(d, 'sources', ())]
        share = share_done(sources) if sources else None
        fill = num_targets / (num_rows * data.seq_len)
        return Contents('document', np.array(lengths), num_learned, num_rows, fill, False, share)
  fill = num_targets / max(1, num_rows * data.seq_len)
  return Contents('document', np.array(lengths), num_learned, num_rows, fill)


@dataclasses.dataclass(frozen=True)
class _Measuring:
  """A dataset that notes the lengths of its examples."""

  dataset: Examples
  lengths: list[int]

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Example]]:
    for number, example in self.dataset.examples(shard, shuffle, seed, start):
      self.lengths.append(len(example.ids))
      yield number, example


def report(data: RowInput | StreamInput) -> list[str]:
  """Returns lines on the lengths of examples or documents, on rows, and on what is left out."""
  found = contents_of(data)
  first = '' if found.is_whole else 'the first '
  if not len(found.lengths):
    return ['Contents  nothing']
  total, low, high = found.lengths.sum(), found.lengths.min(), found.lengths.max()
  half, most = np.quantile(found.lengths, [0.5, 0.9], method='higher')
  learned = f', {found.num_learned:,} learned ({found.num_learned / max(1, total):.0%})'
  lines = [
    f'Contents  {first}{amount(len(found.lengths), found.noun)}, {total:,} tokens'
    + (learned if found.is_whole else ''),
    f'Lengths   from {low:,} to {high:,} tokens; half up to {half:,}, nine of ten up to {most:,}',
    *(f'          {line}' for line in histogram(found.lengths)),
  ]
  is_stream = isinstance(data, StreamInput)
  layout = data if isinstance(data, StreamInput) else data.source
  assert isinstance(layout, StreamInput | ExampleRows | TokenRows)
  rows = f'{amount(found.num_rows, "row")} of {layout.seq_len:,} tokens, {found.fill:.0%} full'
  lines.append(f'Rows      {first if is_stream else ""}{rows}')
  cut = int((found.lengths > layout.seq_len).sum())
  if isinstance(layout, ExampleRows):
    lines += _left_out(layout)
  elif cut and layout.rows == ('packed' if is_stream else 'sequences'):
    lines.append(f'Cut       {amount(cut, "document")} of more than {layout.seq_len:,} tokens')
  if found.share:
    num_rows = round(found.num_rows / found.share) if is_stream else found.num_rows
    roughly = 'about: ' if is_stream and not found.is_whole else ''
    lines.append(f'Epoch     {roughly}{epoch(num_rows, data.batch_size)}')
  return lines + [f'Note      {line}' for line in warnings(data)]


def _left_out(source: ExampleRows) -> list[str]:
  """Says which examples are too long, and what becomes of them."""
  lines = []
  if source.num_cut:
    lines.append(f'Cut       {amount(source.num_cut, source.noun)}, too long')
  if source.num_skipped:
    why = 'whose answer begins behind the cut' if source.too_long == 'truncate' else 'too long'
    lines.append(f'Left out  {amount(source.num_skipped, source.noun)}, {why}')
  return [*lines, f'          the longest: {source.long.longest}'] if lines else lines


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
    'Tokens of an example, and how many examples have so many:',
    *(f'  {line}' for line in histogram(source.lengths)),
    f'The first example, {how_learned(color)}:',
    example_text(source, 0, color, _MOST_TOKENS),
  ]


def how_learned(color: bool) -> str:
  """Says how example_text and masked_text mark what is learned."""
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
