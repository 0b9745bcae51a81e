"""Records that a run leaves out from a step on, listed in a file as FILE:RECORD lines.

The places are those of error messages and of `paxlite data`. A file may have any of its names: two
spellings of a record are one record, and a relative name may begin at another folder, where it is
the end of one file's name alone. Lines that begin with # say something to people. Nothing
else of the data moves: the order of records and rows, and the positions of streams, stay as they
are, so that a run may begin to leave records out at any step.

  streams of documents    the reader passes over the record, and the next one takes its place
  rows with segments      the tokens of the record become padding, which no other text attends to
  rows without segments   are refused: a later text in the row would still see the record
"""

import dataclasses
import os
import re
import zlib
from collections.abc import Sequence

from paxlite.core.errors import UserError
from paxlite.data.base import Input, RowInput
from paxlite.data.documents import DocumentDataset
from paxlite.data.example_rows import ExampleRows
from paxlite.data.mixture import MixtureInput
from paxlite.data.places import Place
from paxlite.data.records import canonical
from paxlite.data.rows import TokenRows
from paxlite.data.streams import StreamInput
from paxlite.data.text import TextRows
from paxlite.files.text_files import lines

_MOST = 100_000  # records, of which each checkpoint holds a checksum
Key = tuple[str, int | None]  # of a record: the one name of its file or dataset, and its number
_SHARD = re.compile(r'\[\d+\]$')  # of a dataset of several


def without(data: Input, path: str, flag: str = '') -> Input:
  """Makes an input leave out the records that a file names; returns the input.

  Args:
    flag: What messages call it; '': LEAVE_OUT.

  Raises:
    UserError: The file names none, or one that is not in the data, or they cannot leave it out.
  """
  names = sources(data)
  places = [_as_in(names, place) for place in read(path)]
  left = dict.fromkeys(places, True)
  parts = data.inputs if isinstance(data, MixtureInput) else [data]
  for part in parts:
    for place in _leave_out(part, places):
      left.pop(place, None)
  if left:
    first, said = next(iter(left)), flag or f'LEAVE_OUT={path}'
    raise UserError(
      f'{said}: {first} is not a record of {data.name[:200]}: name a record FILE:RECORD, as '
      'paxlite data shows it'
    )
  data.left_out = checksums(places, names)  # type: ignore[attr-defined]
  return data


def read(path: str) -> list[Place]:
  """Returns the records that a file names, in its first spelling of each.

  Raises UserError if it names none, or too many.
  """
  found: dict[Key, Place] = {}
  for number, line in lines(path):
    text = line.decode('utf-8', 'replace').strip()
    if text.startswith('#') or not text:
      continue
    place = Place.of(text)
    if place.record is None:
      raise UserError(f'{path}:{number + 1} is not FILE:RECORD, as corpus.jsonl:17: {text[:100]}')
    found.setdefault(key_of(place), place)
  if not found:
    raise UserError(f'{path} names no record to leave out')
  if len(found) > _MOST:
    raise UserError(
      f'{path} names {len(found):,} records; a run can leave out at most {_MOST:,}: write files '
      'without them, and start another run'
    )
  return list(found.values())


def key_of(place: Place) -> Key:
  """Returns the key of a record, the same for all names of its file."""
  return canonical(place.source), place.record


def checksums(places: Sequence[Place], sources: Sequence[str]) -> list[int]:
  """Returns a checksum of each record's name, which does not depend on the order of records.

  It is the same where the data are in another folder: it is that of the name of a file without its
  folder, and, as several files may have one name, of the file's number. The name is that by which
  the input calls the file.

  Args:
    places: The records.
    sources: The names of the files and datasets of the input, in its order.
  """
  numbers: dict[str, int] = {}
  for name in sources:
    numbers.setdefault(canonical(name), len(numbers))
  names = {canonical(name): name for name in reversed(sources)}
  found = {}
  for place in places:
    if place.source not in found:
      keys = canonical(place.source), canonical(_file(place))
      key = next((key for key in keys if key in numbers), keys[0])
      shard = place.source[len(_file(place)) :] if key != keys[0] else ''
      last = names.get(key, place.source).rpartition('/')[2]
      found[place.source] = f'{numbers.get(key, 0)}:{last}{shard}'
  texts = (f'{found[place.source]}:{place.record}' for place in places)
  return sorted(zlib.crc32(text.encode()) for text in texts)


def is_of(place: Place, names: Sequence[str]) -> bool:
  """Returns whether a record is of one of these files and datasets."""
  own = canonical(place.source), canonical(_file(place))
  return any(canonical(name) in own for name in names)


def sources(data: Input) -> list[str]:
  """Returns the names of the files and datasets of an input, in its order."""
  parts = data.inputs if isinstance(data, MixtureInput) else [data]
  return [name for part in parts for name in _sources(part)]


def _sources(data: Input) -> Sequence[str]:
  if isinstance(data, StreamInput):
    datasets = [each for each in data.source.datasets if isinstance(each, DocumentDataset)]
    return [source.name for dataset in datasets for source in dataset.sources]
  source = getattr(data, 'source', None)
  return source.files if isinstance(source, ExampleRows | TextRows) else [data.name]


def _leave_out(data: object, places: Sequence[Place]) -> list[Place]:
  """Makes an input leave records out; returns those that are its own."""
  source = getattr(data, 'source', None)
  if isinstance(data, StreamInput):
    found: list[Place] = []
    for dataset in data.source.datasets:
      if not isinstance(dataset, DocumentDataset):
        raise _refusal(data.name, 'SeqIO does not say which record a text is')
      names = {canonical(each.name): each.name for each in dataset.sources}
      own = {p: names[key] for p in places if (key := canonical(_file(p))) in names}
      dataset.left_out |= {f'{own[p]}{p.source[len(_file(p)) :]}:{p.record}' for p in own}
      found += own
    return found
  if isinstance(data, RowInput) and isinstance(source, ExampleRows):
    if source.examples_of_a_record != 1:
      raise _refusal(source.name, 'the answers of a sequence are compared with each other')
    return _left_out_of(source, places)
  if isinstance(data, RowInput) and isinstance(source, TokenRows):
    if source.rows == 'stream':
      why = 'its sequences join texts without a border (PACKED_INPUT=False)'
      raise _refusal(source.name, why)
    return _left_out_of(source, places)
  raise _refusal(str(getattr(data, 'name', data)), 'its texts are not records of files')


def _left_out_of(source: ExampleRows | TokenRows, places: Sequence[Place]) -> list[Place]:
  found = source.leave_out(places)
  if len(source.left_out) >= source.num_documents:
    raise UserError(f'LEAVE_OUT names all records of {source.name[:200]}: name fewer')
  return found


def _as_in(names: Sequence[str], place: Place) -> Place:
  """Returns a place with the name that the data have for its file, if one file alone ends so."""
  file = _file(place)
  keys = canonical(place.source), canonical(file)
  if os.path.isabs(file) or any(canonical(name) in keys for name in names):
    return place
  end = f'/{os.path.normpath(file)}'
  found = {canonical(name): name for name in names if canonical(name).endswith(end)}
  if len(found) != 1:
    return place
  (name,) = found.values()
  return dataclasses.replace(place, source=name + place.source[len(file) :])


def _file(place: Place) -> str:
  return _SHARD.sub('', place.source)


def _refusal(name: str, why: str) -> UserError:
  return UserError(f'LEAVE_OUT: no record can be left out of {name[:200]} exactly, because {why}')
