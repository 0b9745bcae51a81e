"""The texts of a step: as lines for people, and as JSON."""

import json
from collections.abc import Iterator, Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount, shortened
from paxlite.data.base import Batch
from paxlite.data.data_summary import how_learned, masked_text
from paxlite.data.tokenizer import Tokenizer
from paxlite.run_data.origins import DocumentSpan, pieces, place_of
from paxlite.run_data.run_data import RunData

_NAME_CHARS = 120  # a list of files may be long


def check_row(batch: Batch, row: int | None) -> None:
  """Raises UserError if a batch has no such row."""
  count = len(batch['ids'])
  if row is not None and not 0 <= row < count:
    raise UserError(f'--row={row}: the batch has rows 0 to {count - 1}')


def described(run: RunData, step: int, batch: Batch, row: int | None = None) -> JsonObject:
  """Returns the texts of a step, or of one of its rows, as JSON."""
  check_row(batch, row)
  rows = range(len(batch['ids'])) if row is None else [row]
  return {
    'run': run.place, 'step': step, 'batch': run.batch_number(step), 'loss': run.losses.get(step),
    'rows': [{'row': r, 'texts': list(_texts(run, step, batch, r))} for r in rows],
  }  # fmt: skip


def _texts(run: RunData, step: int, batch: Batch, row: int) -> Iterator[JsonObject]:
  data, tokenizer = run.data_of(step), run.tokenizer
  for piece in pieces(batch, row):
    place = place_of(data, piece.key)
    ids, learned = tokens_of(batch, row, piece)
    yield {
      'start': piece.start, 'end': piece.end, 'segment': piece.segment, 'source': place.source,
      'record': place.record, 'place': str(place), 'unknown': place.unknown, 'token': piece.token,
      'first_input': int(batch['ids'][row, piece.start]), 'ids': ids.tolist(),
      'learned': learned.astype(int).tolist(),
      'text': None if tokenizer is None else tokenizer.decode_marked(ids.tolist()),
    }  # fmt: skip


def tokens_of(batch: Batch, row: int, piece: DocumentSpan) -> tuple[np.ndarray, np.ndarray]:
  """Returns the targets of a piece [n], and which of them count in the loss [n]."""
  here = slice(piece.start, piece.end)
  return batch['labels'][row, here], batch['weights'][row, here] > 0


def lines(
  run: RunData, step: int, batch: Batch, row: int | None, color: bool, most: int | None
) -> Iterator[str]:
  """Yields the lines that show the texts of a step.

  Args:
    row: The row that is shown; None: all.
    color: Whether what counts in the loss is green; otherwise it is in [[ ]].
    most: The most tokens of a text that are shown; None: all.
  """
  check_row(batch, row)
  data, (rows, length) = run.data_of(step), batch['ids'].shape
  loss = run.losses.get(step)
  said = '' if loss is None else f', loss {loss:.4f}'
  name = shortened(data.name, _NAME_CHARS)
  yield f'Step {step:,}{said}: batch {run.batch_number(step):,} of {name}'
  yield f'          {amount(rows, "row")} of {amount(length, "token")}; {how_learned(color)}'
  if run.tokenizer is None:
    yield '          ids, because the run names no tokenizer'
  for number in range(rows) if row is None else [row]:
    yield ''
    yield f'Row {number}'
    found = pieces(batch, number)
    is_packed = len({piece.segment for piece in found}) > 1
    for piece in found:
      ids, learned = tokens_of(batch, number, piece)
      yield f'  {_extent(piece, learned, is_packed)}: {place_of(data, piece.key)}'
      if piece.token == 1:  # the token before is the input of the first target
        ids = np.concatenate([batch['ids'][number, piece.start : piece.start + 1], ids])
        learned = np.concatenate([[False], learned])
      cut = ' …' if most is not None and len(ids) > most else ''
      text = shown(run.tokenizer, ids[:most], learned[:most], color)
      yield from (f'    {line}' for line in f'{text}{cut}'.split('\n'))


def _extent(piece: DocumentSpan, learned: np.ndarray, is_packed: bool) -> str:
  """Describes which tokens of a sequence a text has, and how many count."""
  segment = f'segment {piece.segment}, ' if is_packed else ''
  count = int(learned.sum())
  counted = 'all learned' if count == len(learned) else f'{count:,} of them learned'
  begins = '' if piece.token in (None, 0, 1) else f', from token {piece.token:,} of its document'
  return f'{segment}{amount(len(learned), "token")} at {piece.start:,}, {counted}{begins}'


def shown(
  tokenizer: Tokenizer | None, ids: np.ndarray, learned: np.ndarray, color: bool = False
) -> str:
  """Returns the text of ids [n] with what is learned marked, or the ids without a tokenizer."""
  if tokenizer is None:
    return ' '.join(map(str, ids.tolist()))
  return masked_text(tokenizer, ids, learned, color)


def print_json(found: JsonObject | Sequence[JsonObject]) -> None:
  print(json.dumps(found, ensure_ascii=False))
