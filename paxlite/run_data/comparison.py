"""Proves that two runs were trained on the same batches, or finds where they differ."""

import collections
import dataclasses
import zlib
from collections.abc import Iterator

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount
from paxlite.data.base import Batch
from paxlite.data.tokenizer import Tokenizer, vocabulary_fingerprint
from paxlite.run_data.origins import ORIGIN, Key, names_records, pieces, place_of
from paxlite.run_data.run_data import RunData
from paxlite.run_data.texts import shown, tokens_of

_SHOWN = 40  # tokens around the first difference


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first difference between two batches."""

  step: int
  what: str  # the array that differs, or 'shape'
  row: int | None = None  # the row; None: the shapes differ
  position: int | None = None  # the position in the row; None: the shapes differ


@dataclasses.dataclass
class Comparison:
  """The comparison of two runs' training data."""

  steps: int  # the steps that both have done
  equal: int = 0  # how many steps, from the first on, have the same batches
  checksum: int = 0  # a CRC-32 of the checksums of these batches
  difference: Difference | None = None  # the first difference; None: there is none
  # how many documents both have seen in these steps; None: the runs do not differ, or the data do
  # not name their documents
  documents: int | None = None
  only: tuple[int, int] = (0, 0)  # how many documents only one of them has seen, for each run
  # the document whose numbers of tokens seen differ most, and the numbers; None: all are the same
  unequal: tuple[str, int, int] | None = None
  # a document that both have first seen at other steps: its place, and the steps
  moved: tuple[str, int, int] | None = None


def checksum(batch: Batch) -> int:
  """Returns a CRC-32 of the arrays of a batch."""
  found = 0
  for name in sorted(batch.keys() - {ORIGIN}):
    array = np.ascontiguousarray(batch[name])
    found = zlib.crc32(repr((name, array.shape, array.dtype.str)).encode(), found)
    found = zlib.crc32(array.tobytes(), found)
  return found


def check_tokenizers(one: RunData, other: RunData) -> None:
  """Raises UserError if ids do not mean the same tokens in both runs."""
  if _vocabulary(one.tokenizer) != _vocabulary(other.tokenizer):
    names = [run.tokenizer.path if run.tokenizer else 'none' for run in (one, other)]
    raise UserError(
      f'{one.place} and {other.place} have different tokenizers, {names[0]} and {names[1]}, so '
      'their ids cannot be compared'
    )


def _vocabulary(tokenizer: Tokenizer | None) -> object:
  if tokenizer is None:
    return None
  return vocabulary_fingerprint(tokenizer), sorted(tokenizer.named_tokens.items())


def compared(one: RunData, other: RunData) -> Comparison:
  """Compares two runs over the steps that both have completed.

  Raises:
    UserError: They have other tokenizers, or there is no such step, or the data cannot be read.
  """
  check_tokenizers(one, other)
  found = Comparison(min(one.steps_done, other.steps_done))
  if not found.steps:
    raise UserError(f'{(one if not one.steps_done else other).place} has done no step yet')
  for (step, batch), (_, theirs) in zip(
    one.batches(1, found.steps), other.batches(1, found.steps), strict=True
  ):
    if difference := _difference(step, batch, theirs):
      found.difference = difference
      break
    found.equal = step
    found.checksum = zlib.crc32(checksum(batch).to_bytes(4, 'little'), found.checksum)
  if found.difference is not None:
    _compare_documents(one, other, found)
  return found


def _difference(step: int, one: Batch, other: Batch) -> Difference | None:
  names = sorted(
    (one.keys() | other.keys()) - {ORIGIN}, key=lambda n: (n not in one, n != 'labels')
  )
  if one['labels'].shape != other['labels'].shape:
    return Difference(step, 'shape')
  places = []
  for name in names:
    if name not in one or name not in other:
      return Difference(step, name)
    a, b = one[name], other[name]
    if a.shape != b.shape or a.dtype != b.dtype:
      return Difference(step, name)
    is_float = np.issubdtype(a.dtype, np.floating)
    if not np.array_equal(a, b, equal_nan=is_float):
      same = (a == b) | (np.isnan(a) & np.isnan(b)) if is_float else a == b
      row, position = np.argwhere(~same)[0][:2].tolist()
      places.append((row, position, name))
  if not places:
    return None
  row, position, name = min(places, key=lambda p: p[:2])
  return Difference(step, name, row, position)


def _seen(run: RunData, steps: int) -> tuple[collections.Counter[str], dict[str, int]] | None:
  """Returns how many tokens of each document a run has seen, and when first; None: unknown."""
  tokens: collections.Counter[str] = collections.Counter()
  first: dict[str, int] = {}
  names: dict[tuple[int, Key], str] = {}
  for step, batch in run.batches(1, steps):
    data = run.data_of(step)
    for row in range(len(batch['ids'])):
      for piece in pieces(batch, row):
        if not names_records(data, piece.key):
          return None
        key = id(data), piece.key
        if key not in names:
          names[key] = str(place_of(data, piece.key))
        tokens[names[key]] += piece.end - piece.start
        first.setdefault(names[key], step)
  return tokens, first


def _compare_documents(one: RunData, other: RunData, found: Comparison) -> None:
  seen = [_seen(run, found.steps) for run in (one, other)]
  if None in seen:
    return
  (ours, ours_first), (theirs, theirs_first) = (each for each in seen if each is not None)
  both = ours.keys() & theirs.keys()
  found.documents = len(both)
  found.only = len(ours.keys() - both), len(theirs.keys() - both)
  furthest = max(both, key=lambda name: (abs(ours[name] - theirs[name]), name), default=None)
  if furthest is not None and ours[furthest] != theirs[furthest]:
    found.unequal = furthest, ours[furthest], theirs[furthest]
  for name in ours_first:
    if name in both and ours_first[name] != theirs_first[name]:
      found.moved = name, ours_first[name], theirs_first[name]
      break


def lines(one: RunData, other: RunData, found: Comparison) -> Iterator[str]:
  """Yields the lines of a comparison."""
  both = f'{one.place} and {other.place}'
  if found.difference is None:
    yield (
      f'Same      {both} were trained on the same batches in all '
      f'{amount(found.steps, "step")} that both have done (checksum {found.checksum:08x})'
    )
    return
  at = found.difference
  before = f'equal for {amount(found.equal, "step")} before' if found.equal else 'it is the first'
  yield f'Different {both} differ at step {at.step:,}; {before}'
  if at.row is None or at.position is None:
    yield f'          their batches have another {at.what}'
  else:
    yield f'          row {at.row}, position {at.position}: the first difference is in {at.what}'
    for run in (one, other):
      yield from _around(run, at.step, at.row, at.position)
  yield from _order(found, one, other)


def _order(found: Comparison, one: RunData, other: RunData) -> Iterator[str]:
  if found.documents is None:
    yield 'Documents unknown: the data do not name their records'
    return
  steps = f'in the first {amount(found.steps, "step")}'
  if not any(found.only):
    often = 'but not equally often' if found.unequal else 'equally often, in another order'
    yield f'Documents both saw the same {found.documents:,} {steps}, {often}'
  else:
    yield (
      f'Documents {found.documents:,} were seen by both {steps}, {found.only[0]:,} only by '
      f'{one.place} and {found.only[1]:,} only by {other.place}'
    )
  if found.unequal:
    name, here, there = found.unequal
    yield f'          such as {name}: {here:,} of its tokens in one, and {there:,} in the other'
  if found.moved:
    name, here, there = found.moved
    yield f'          {name} comes first at step {here:,} of one and at step {there:,} of the other'


def _around(run: RunData, step: int, row: int, position: int) -> Iterator[str]:
  """Yields the training text at a position and after it."""
  batch = run.batch(step)
  piece = next((p for p in pieces(batch, row) if p.start <= position < p.end), None)
  if piece is None:
    yield f'          {run.place}: padding'
    return
  ids, learned = tokens_of(batch, row, piece)
  here = slice(position - piece.start, position - piece.start + _SHOWN)
  text = shown(run.tokenizer, ids[here], np.zeros_like(learned[here])).replace('\n', '\\n')
  yield f'          {run.place}: {place_of(run.data_of(step), piece.key)}: {text}'


def as_json(one: RunData, other: RunData, found: Comparison) -> JsonObject:
  """Returns a comparison as JSON."""
  return {'runs': [one.place, other.place], 'same': found.difference is None} | dataclasses.asdict(
    found
  )
