"""Records of files. The module records names the kinds of files."""

import abc
import array
import contextlib
import csv
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

from paxlite.core import shell
from paxlite.core.errors import UserError, line_of
from paxlite.data.parquet_bounds import BATCH_BYTES, rows_at_once
from paxlite.files.json_files import is_json, parse_objects
from paxlite.files.schemes import is_address
from paxlite.files.text_files import (
  BOM,
  COMPRESSED,
  check_file,
  fingerprint_of,
  head_of,
  kind,
  line_blocks,
  line_ranges,
  lines_of,
  open_raw,
  read_text,
  size_of,
)

Record = Mapping[str, object]
Raw = bytes | str | Record  # an unparsed line, the text of a file, or a record

_JSON_LINES = ('.jsonl', '.ndjson')
_TABLES = ('.csv', '.tsv')
_TEXTS = ('.txt', '.text', '.md', '.rst', '')
OF_RECORDS = (*_JSON_LINES, '.json', *_TABLES, '.parquet')
_CELL_CHARS = 1 << 28
_SHOWN_CHARS = 500
_ROW_CHARS = 1 << 28  # of a row of a table, whose cells may have many lines


def open_file(name: str) -> 'File':
  """Opens the file called `name`; its suffix, and for .json its first line, say what it holds.

  Raises UserError if there is no such file, or none of that kind can be read.
  """
  check_file(name)
  if kind(name) in _JSON_LINES:
    return JsonLines(name)
  if kind(name) == '.json':
    return JsonLines(name) if _holds_lines(name) else Json(name)
  if kind(name) in _TABLES:
    return CsvFile(name)
  if kind(name) == '.parquet':
    return Parquet(name)
  if kind(name) in _TEXTS:
    return Text(name)
  raise UserError(f'{name} is neither {", ".join(OF_RECORDS)} nor .txt')


class File(abc.ABC):
  """A source that is one file, which is one shard."""

  num_shards = 1

  def __init__(self, name: str):
    self.name = name
    self.size: int | None = size_of(name)
    self.done = 0

  def place(self, shard: int, number: int) -> str:
    return f'{self.name}:{number + 1}'

  @property
  def shard_bytes(self) -> float:
    return float(self.size or 0)

  @property
  def fingerprint(self) -> int:
    return fingerprint_of(self.name)

  @abc.abstractmethod
  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    """Yields the numbers and records from record `start` on; see data.records.Records."""


class JsonLines(File):
  """A file of JSON lines. Reading it in blocks of unparsed lines is very cheap."""

  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    for first, _, block in self.blocks(start):
      yield from lines_of(block, first)

  def blocks(self, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yields the blocks of files.line_blocks, from line `start` on."""
    with open_raw(self.name) as raw:
      for first, after, block in line_blocks(self.name, raw):
        self.done = self.done if raw.closed else raw.tell()  # it is closed when the last line comes
        if first < start < after:
          block, first = block.split(b'\n', start - first)[-1], start
        if start < after:
          yield first, after, block
    self.done = self.size or 0

  def ranges(self, start: int = 0) -> 'Iterator[tuple[int, int, bytes | FileRange]]':
    """Yields the blocks from line `start` on as ranges of the file.

    A compressed file has no such ranges, and an object in a store is not read by other processes.
    Their blocks are yielded themselves, as by `blocks`.
    """
    if pathlib.Path(self.name).suffix in COMPRESSED or is_address(self.name):
      yield from self.blocks(start)
      return
    for first, after, begin, end in line_ranges(self.name, start):
      self.done = end
      yield first, after, FileRange(self.name, begin, end - begin)


@dataclasses.dataclass(frozen=True)
class FileRange:
  """A range of bytes of a file, which another process can read."""

  path: str
  offset: int
  size: int

  def __len__(self) -> int:
    return self.size

  def read(self) -> bytes:
    with open(self.path, 'rb') as f:
      f.seek(self.offset)
      return f.read(self.size)


class Text(File):
  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    if start == 0:
      yield 0, read_text(self.name)
      self.done = self.size or 0


class Parquet(File):
  """A Parquet file; it decodes as many rows at once as fit in memory."""

  def __init__(self, name: str):
    super().__init__(name)
    try:
      import pyarrow.parquet as parquet
    except ImportError:
      raise UserError(f'{name} needs the package pyarrow: {shell.install("hf")}') from None
    with read_errors(name):
      self._file = parquet.ParquetFile(open_raw(name) if is_address(name) else name)
    self.size = self._file.metadata.num_rows

  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    metadata, number = self._file.metadata, 0
    for group in range(metadata.num_row_groups):
      rows = metadata.row_group(group).num_rows
      if rows and number + rows > start:
        for record in self._records(group):
          self.done = number + 1
          if number >= start:
            yield number, record
          number += 1
      else:
        number += rows

  def _records(self, group: int) -> Iterator[Record]:
    with read_errors(self.name), open_raw(self.name) as raw:

      def read(offset: int, length: int) -> bytes:
        raw.seek(offset)
        return raw.read(length)

      count = rows_at_once(self._file.metadata, group, read, self.name)
      for batch in self._file.iter_batches(count, row_groups=[group]):
        # Values are counted on average, so that one row may hold most of them.
        fits = batch.nbytes <= BATCH_BYTES
        for part in [batch] if fits else (batch.slice(i, 1) for i in range(batch.num_rows)):
          if part.nbytes > BATCH_BYTES:
            raise UserError(
              f'{self.name} has a row of more than {BATCH_BYTES >> 20} MiB, which cannot be a '
              'record: cut it into several rows'
            )
          yield from map(without_nulls, part.to_pylist())


class _Parsed(File):
  """A file with records of several lines, located by their first line."""

  def __init__(self, name: str):
    super().__init__(name)
    self._lines = array.array('q')  # of the records that have been read

  def read(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw]]:
    for number, (line, record) in enumerate(self._parsed()):
      if number == len(self._lines):
        self._lines.append(line)
      if number >= start:
        yield number, record
    self.done = self.size or 0

  def place(self, shard: int, number: int) -> str:
    return f'{self.name}:{self._lines[number] + 1}'

  @abc.abstractmethod
  def _parsed(self) -> Iterator[tuple[int, Record]]:
    """Yields the records, and the number from 0 of the line in which each begins."""


class Json(_Parsed):
  """A list of objects, or one object after another. It is read as a whole."""

  def _parsed(self) -> Iterator[tuple[int, Record]]:
    yield from parse_objects(read_text(self.name), self.name)


class CsvFile(_Parsed):
  """A CSV file with column names in its first line.

  Columns are separated by commas, semicolons or tabs, whichever the first line has most of.
  """

  _row_chars = 0  # of the row that is being read

  def _parsed(self) -> Iterator[tuple[int, Record]]:
    csv.field_size_limit(_CELL_CHARS)  # Python's own limit is 128 Ki characters
    lines, line = self._bounded(self._decoded()), 0
    first = next(lines)
    separator = max(',;\t', key=first.count)
    try:
      (names,) = csv.reader([first], delimiter=separator, strict=True)
      if len(set(names)) != len(names) or not all(names):
        shown = str(names)[:_SHOWN_CHARS]
        raise UserError(f'{self.name}:1 must name the columns, each with another name: {shown}')
      line, rows = 1, csv.reader(lines, delimiter=separator, strict=True)
      self._row_chars = 0
      for row in rows:
        self._row_chars = 0
        if row and len(row) != len(names):
          raise UserError(
            f'{self.name}:{line + 1} has {len(row)} columns and the first line names '
            f'{len(names)}: put texts with separators or line breaks into quotes'
          )
        if row:  # it is empty where a line is blank
          yield line, dict(zip(names, row, strict=True))
        line = rows.line_num + 1
    except csv.Error as e:
      raise UserError(f'{self.name}:{line + 1} is not CSV: {e}') from None

  def _bounded(self, lines: Iterator[str]) -> Iterator[str]:
    """Yields the lines; a row of many lines, as after a quote that nobody closes, is refused."""
    for number, line in enumerate(lines, 1):
      self._row_chars += len(line)
      if self._row_chars > _ROW_CHARS:
        raise UserError(
          f'{self.name}:{number} is in a row of more than {_ROW_CHARS >> 20} Mi characters, which '
          'cannot be a record: look for a quote that is not closed'
        )
      yield line

  def _decoded(self) -> Iterator[str]:
    """Yields the lines with their ends."""
    with open_raw(self.name) as raw:
      for first, _, block in line_blocks(self.name, raw):
        self.done = self.done if raw.closed else raw.tell()
        start = BOM if first == 0 else b''
        for number, line in enumerate(block.removeprefix(start).splitlines(keepends=True), first):
          try:
            yield line.decode('utf-8')
          except UnicodeDecodeError as e:
            raise UserError(
              f'{self.name}:{number + 1} is not UTF-8 (byte {e.start} of the line): save the table '
              'as "CSV UTF-8"'
            ) from None


def _holds_lines(name: str) -> bool:
  """Whether a .json file holds JSON lines, and neither a list nor objects over several lines."""
  head = head_of(name, 1 << 16).lstrip()
  first, newline, _ = head.partition(b'\n')
  return not head.startswith(b'[') and (not newline or is_json(first))


def without_nulls(record: Record) -> Record:
  """Returns a row of a table without the keys of inner structs that have no value.

  All rows of a table have the same keys at each depth, so that a message, a call or a schema has
  those of all others, with nulls. JSON lines do not.
  """
  return {k: _present(v) if isinstance(v, dict | list) else v for k, v in record.items()}


def _present(value: object) -> object:
  if isinstance(value, dict):
    return {k: _present(v) for k, v in value.items() if v is not None}
  # a list of numbers, such as ids, has many of them
  first = next((v for v in value if v is not None), 0) if isinstance(value, list) else 0
  if isinstance(value, list) and isinstance(first, dict | list):
    return [_present(v) for v in value]
  return value


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
  """Turns any exception of a dataset package, which has dozens of them, into a UserError."""
  try:
    yield
  except (UserError, GeneratorExit, KeyboardInterrupt):
    raise
  except Exception as e:
    raise UserError(f'{name} cannot be read: {line_of(e)}') from None
