"""Describes a run's inputs in lines for `paxlite data`."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from paxlite.core.wording import amount
from paxlite.data.base import RowInput
from paxlite.data.data_summary import epoch, histogram, share_filled, warnings
from paxlite.data.example_rows import ExampleRows
from paxlite.data.records import share_done
from paxlite.data.rows import TokenRows
from paxlite.data.stream_rows import Example
from paxlite.data.streams import Examples, StreamInput

_MOST_DOCUMENTS = 100_000  # of a stream, or of a large file of tokens, that are looked at


@dataclasses.dataclass(frozen=True)
class Contents:
  """The documents or examples of an input, and the rows that they fill."""

  noun: str  # what they are called, in the singular
  lengths: np.ndarray  # number of tokens of each [n]
  num_learned: int  # number of tokens that are learned
  num_rows: int  # number of rows
  fill: float  # share of the rows' tokens that are targets
  is_whole: bool = True  # whether this is all of the input
  share: float | None = 1.0  # how much of the input this is, roughly; None: not known


def contents_of(data: RowInput | StreamInput) -> Contents:
  """Returns the contents of an input. Of a long stream, only the first documents are read."""
  if isinstance(data, StreamInput):
    return _contents_of_stream(data)
  source = data.source
  if isinstance(source, ExampleRows):
    lengths, learned = source.lengths, source.num_learned
    return Contents(source.noun, lengths, learned, len(source), share_filled(source))
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
  """A dataset that records the lengths of its examples."""

  dataset: Examples
  lengths: list[int]

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Example]]:
    for number, example in self.dataset.examples(shard, shuffle, seed, start):
      self.lengths.append(len(example.ids))
      yield number, example


def report(data: RowInput | StreamInput) -> list[str]:
  """Returns lines about the lengths of examples or documents, rows, and omissions."""
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
  """Describes the examples that are too long, and their treatment."""
  lines = []
  if source.num_cut:
    lines.append(f'Cut       {amount(source.num_cut, source.noun)}, too long')
  if source.num_skipped:
    why = 'with the whole answer cut off' if source.too_long == 'truncate' else 'too long'
    lines.append(f'Left out  {amount(source.num_skipped, source.noun)}, {why}')
  return [*lines, f'          the longest: {source.long.longest}'] if lines else lines
