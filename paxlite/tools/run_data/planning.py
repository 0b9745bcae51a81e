"""Plans the continuation of a run without some records: writes the file that LEAVE_OUT names."""

import itertools
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence

from paxlite.core.errors import UserError
from paxlite.data import left_out
from paxlite.data.documents import DocumentDataset
from paxlite.data.mixture import MixtureInput
from paxlite.data.origins import names_records, pieces, place_of
from paxlite.data.places import Place
from paxlite.data.record_files import File
from paxlite.data.records import canonical
from paxlite.data.streams import StreamInput
from paxlite.experiments.rows import Rows
from paxlite.files.stored_output import write_output
from paxlite.programs.run_data import RunData
from paxlite.tools.run_data.texts import check_row

_OUTPUT = 'left_out.txt'
_BORDER = re.compile(r'(:\d+)\s*,')  # names of files may have commas


def planned(run: RunData, asked: str, output: str | None) -> Iterator[str]:
  """Writes the file, and yields lines that say how to continue.

  Args:
    run: The run.
    asked: FILE:RECORD and STEP:ROW, apart by commas; a row means all records that it has a part of.
    output: The file; None: left_out.txt, or left_out_2.txt and so on if the run reads that one.
      Records that the run leaves out already are added to it.

  Raises:
    UserError: A record is none of the data, cannot be left out exactly, or the file is another one,
      or one that tells what the steps so far were trained without.
  """
  before = _before(run)
  new = [p for p in _places(run, asked) if _name(p) not in set(map(_name, before))]
  if not new:
    raise UserError(f'--without={asked}: {run.place} leaves these records out already')
  text = ''.join(f'{_name(place)}\n' for place in [*before, *new])
  _check(run, text, new)
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
    f'{"Continue":12}with LEAVE_OUT={os.path.abspath(output)} beside what the run was started '
    f'with. The steps up to {run.steps_done:,} stay as they were trained; to undo steps as well, '
    'start from an earlier checkpoint'
  )


def _output(run: RunData, asked: str | None) -> str:
  """Returns the file to write, which is none that the run reads its steps so far by."""
  first = _OUTPUT if asked is None else asked
  if canonical(first) not in map(canonical, run.files_left_out):
    return first
  stem, suffix = os.path.splitext(first)
  names = (f'{stem}_{n}{suffix}' for n in itertools.count(2))
  free = next(name for name in names if not os.path.lexists(name))
  if asked is None:
    return free
  raise UserError(
    f'--output={asked} is the file that LEAVE_OUT of {run.place} names, and its steps so far are '
    f'read by it: choose another one, such as --output={free}'
  )


def _before(run: RunData) -> list[Place]:
  e = run.experiment
  if not isinstance(e, Rows):
    raise UserError(f'{type(e).__name__} has no LEAVE_OUT: its data are its own')
  return left_out.read(e.LEAVE_OUT) if e.LEAVE_OUT else []


def _name(place: Place) -> str:
  return f'{place.source}:{place.record}'


def _places(run: RunData, asked: str) -> list[Place]:
  found: dict[str, Place] = {}
  parts = _BORDER.sub(r'\1\0', asked).split('\0')
  for word in filter(None, (part.strip(', ') for part in parts)):
    place = Place.of(word)
    if place.record is None:
      raise UserError(f'--without={word} must be FILE:RECORD or STEP:ROW')
    for each in (
      _of_row(run, int(place.source), place.record) if place.source.isdecimal() else [place]
    ):
      found[_name(each)] = each
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


def _check(run: RunData, text: str, new: Sequence[Place]) -> None:
  """Raises UserError if the data cannot leave these records out, or do not have one of them."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'left_out.txt'
    path.write_text(text)
    data = left_out.without(run.plain_data(), str(path), '--without')
  inputs = data.inputs if isinstance(data, MixtureInput) else [data]
  for each in inputs:
    for dataset in each.source.datasets if isinstance(each, StreamInput) else ():
      if isinstance(dataset, DocumentDataset):
        _check_records(dataset, new)


def _check_records(dataset: DocumentDataset, new: Sequence[Place]) -> None:
  """Raises UserError if files do not have a record; datasets of many files are not read for it."""
  for source in dataset.sources:
    wanted = {_name(p) for p in new if left_out.same_source(p, source.name)}
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
  """Whether a file names nothing that the run does not leave out already."""
  try:
    return {_name(p) for p in left_out.read(output)} <= set(map(_name, before))
  except UserError:
    return False
