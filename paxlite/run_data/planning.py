"""Plans the continuation of a run without some records: writes the file that LEAVE_OUT names."""

import itertools
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence

from paxlite.core.errors import UserError
from paxlite.data.base import Input
from paxlite.data.documents import DocumentDataset
from paxlite.data.mixture import MixtureInput
from paxlite.data.places import Place
from paxlite.data.record_files import File
from paxlite.data.records import canonical
from paxlite.data.streams import StreamInput
from paxlite.experiments.rows import Rows
from paxlite.files.output import write_output
from paxlite.run_data import left_out
from paxlite.run_data.origins import names_records, pieces, place_of
from paxlite.run_data.run_data import RunData
from paxlite.run_data.texts import check_row

_OUTPUT = 'left_out.txt'
_END = re.compile(r':\d+(?=\s*(?:,|$))')  # of a FILE:RECORD; names of files may have commas


def planned(run: RunData, asked: str, output: str | None) -> Iterator[str]:
  """Writes the file, and yields lines that say how to continue.

  Raises UserError if a record is none of the data, cannot be left out exactly, or the file is
  another one, or one that tells what the steps so far were trained without.

  Args:
    asked: FILE:RECORD and STEP:ROW, apart by commas; a row means all records that it has a part of.
    output: The file; None: left_out.txt, or left_out_2.txt and so on if the run reads that one.
      Records that the run leaves out already are added to it.
  """
  before, data = _before(run), run.plain_data()
  old = {left_out.key_of(place) for place in before}
  new = [p for p in _places(run, asked, data) if left_out.key_of(p) not in old]
  if not new:
    raise UserError(f'--without={asked}: {run.place} leaves these records out already')
  text = ''.join(f'{_line(place)}\n' for place in [*before, *new])
  _check(data, text, new)
  output = _output(run, output)
  if os.path.exists(output) and not _is_old(output, before):
    raise UserError(f'--output={output} exists, and names other records: choose another file')
  write_output(output, text.encode())
  for i, place in enumerate(new):
    yield f'{"Leaves out" if not i else "":12}{_name(place)}'
  if before:
    yield f'{"":12}and {len(before):,} that the run leaves out already'
  yield f'{"Written":12}{output}'
  yield (
    f"{'Continue':12}with LEAVE_OUT={os.path.abspath(output)} and the run's other arguments. "
    f'Steps up to {run.steps_done:,} stay as trained; to undo steps too, start from an earlier '
    'checkpoint'
  )


def _output(run: RunData, asked: str | None) -> str:
  """Returns the file to write, never one that the run's steps so far need."""
  first = _OUTPUT if asked is None else asked
  if canonical(first) not in map(canonical, run.files_left_out):
    return first
  stem, suffix = os.path.splitext(first)
  names = (f'{stem}_{n}{suffix}' for n in itertools.count(2))
  free = next(name for name in names if not os.path.lexists(name))
  if asked is None:
    return free
  raise UserError(
    f'--output={asked} is the LEAVE_OUT file of {run.place}, which its steps so far need: choose '
    f'another, such as --output={free}'
  )


def _before(run: RunData) -> list[Place]:
  e = run.experiment
  if not isinstance(e, Rows):
    raise UserError(f'{type(e).__name__} has its own data without LEAVE_OUT')
  return left_out.read(e.LEAVE_OUT) if e.LEAVE_OUT else []


def _name(place: Place) -> str:
  return f'{place.source}:{place.record}'


def _line(place: Place) -> str:
  """Returns the line of LEAVE_OUT that names a record."""
  name = _name(place)
  if name.splitlines() != [name]:
    raise UserError(f'--without={name!r}: a name with a line break cannot be in a file of names')
  is_plain = name == name.strip() and not name.startswith('#')
  return name if is_plain else f'./{name}'


def _words(asked: str, sources: Sequence[str]) -> Iterator[str]:
  """Yields FILE:RECORD and STEP:ROW of a list with commas, which names of files may have, too.

  Args:
    asked: The list.
    sources: The names of the files and datasets. Of several borders, the last one that makes one of
      them is taken: with the file `a:1,b.jsonl`, the list a:1,b.jsonl:2 is one record.
  """
  spelled = [spelling for name in sources for spelling in (name, canonical(name))]
  most = 1 + max((len(_END.findall(name)) for name in spelled), default=0)
  rest = asked.strip(', ')
  while rest:
    ends = itertools.islice(_END.finditer(rest), most)
    words = [rest[: end.end()] for end in ends] or [rest]
    known = [word for word in words if left_out.is_of(Place.of(word), sources)]
    word = [words[0], *known][-1]
    yield word
    rest = rest[len(word) :].lstrip(', ')


def _places(run: RunData, asked: str, data: Input) -> list[Place]:
  found: dict[left_out.Key, Place] = {}
  for word in _words(asked, left_out.sources(data)):
    place = Place.of(word)
    if place.record is None:
      raise UserError(f'--without={word} must be FILE:RECORD or STEP:ROW')
    for each in (
      _of_row(run, int(place.source), place.record) if place.source.isdecimal() else [place]
    ):
      found.setdefault(left_out.key_of(each), each)
  if not found:
    raise UserError('--without= names no record: FILE:RECORD or STEP:ROW')
  return list(found.values())


def _of_row(run: RunData, step: int, row: int) -> list[Place]:
  batch, data = run.batch(step), run.data_of(step)
  check_row(batch, row)
  places = []
  for piece in pieces(batch, row):
    place = place_of(data, piece.key)
    if not names_records(data, piece.key) or place.record is None:
      raise UserError(f'--without={step}:{row}: {place}')
    places.append(place)
  return places


def _check(data: Input, text: str, new: Sequence[Place]) -> None:
  """Raises UserError if the data cannot leave these records out, or lack one of them.

  The data then leave them out.
  """
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'left_out.txt'
    path.write_text(text)
    left_out.without(data, str(path), '--without')
  inputs = data.inputs if isinstance(data, MixtureInput) else [data]
  for each in inputs:
    if isinstance(each, StreamInput):
      for dataset in each.source.datasets:
        if isinstance(dataset, DocumentDataset):
          _check_records(dataset, new)
      _check_left(each)


def _check_left(data: StreamInput) -> None:
  """Raises UserError if a stream cannot make a batch of what is left of it."""
  batches = data.train_batches(0, slice(0, data.batch_size))
  try:
    next(batches)
  except UserError as e:
    raise UserError(f'--without: too little is left to train on: {e}') from None


def _check_records(dataset: DocumentDataset, new: Sequence[Place]) -> None:
  """Raises UserError if files lack a record; datasets of many files are not read for this."""
  for source in dataset.sources:
    wanted = {_name(p) for p in new if left_out.is_of(p, [source.name])}
    if not wanted or not isinstance(source, File):
      continue
    numbers = {p.rpartition(':')[2] for p in wanted}
    for number, _ in source.read(0):
      numbers.discard(source.place(0, number).rpartition(':')[2])
      if not numbers:
        break
    if numbers:
      raise UserError(f'--without: {source.name} has no record {min(numbers)}')


def _is_old(output: str, before: Sequence[Place]) -> bool:
  """Whether the run already leaves out all records of a file."""
  try:
    return set(map(left_out.key_of, left_out.read(output))) <= set(map(left_out.key_of, before))
  except UserError:
    return False
