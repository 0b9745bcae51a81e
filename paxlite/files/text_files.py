"""Reading text and JSON lines, compressed or not, with errors that name file and line."""

import fnmatch
import glob
import gzip
import io
import lzma
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, cast

from paxlite import extensions
from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.files import paths
from paxlite.files.schemes import content_of, is_address, scheme_of
from paxlite.files.zstd import ZstdReader, most_window

_DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
_BLOCK_BYTES = 1 << 19
_TEXT_BYTES = 1 << 24
_LINE_BYTES = 1 << 28  # no record of a dataset is longer
_XZ_BYTES = 1 << 24  # that xz needs in addition to its window
_OF_TEXTS = ('.jinja', '.jinja2', '.j2', '.txt', '.md')
COMPRESSED = ('.gz', '.xz', '.zst')
BOM = b'\xef\xbb\xbf'  # Windows begins UTF-8 files with it
_KINDS = {
  stat.S_ISDIR: 'a folder', stat.S_ISFIFO: 'a FIFO or a pipe', stat.S_ISSOCK: 'a socket',
  stat.S_ISCHR: 'a device', stat.S_ISBLK: 'a device',
}  # fmt: skip


def check_file(path: str | pathlib.Path) -> None:
  """Raises UserError unless `path` is a regular file: others may block the reader or never end."""
  if is_address(str(path)):
    size_of(path)
    return
  try:
    mode = os.stat(path).st_mode
  except (FileNotFoundError, NotADirectoryError, ValueError):
    raise UserError(f'{path} is not a file: there is none') from None
  except OSError as e:
    raise UserError(f'{path} cannot be read: {e.strerror}') from None
  for is_one, kind_of_file in _KINDS.items():
    if is_one(mode):
      hint = f'{path}/* are its files' if is_one is stat.S_ISDIR else 'copy what it gives to one'
      raise UserError(f'{path} is not a file, it is {kind_of_file}: {hint}')


def fingerprint_of(path: str | pathlib.Path) -> int:
  """A checksum of a file's first and last 64 KiB and its size: cheap, and rarely the same twice."""
  content = content_of(str(path))
  head, size = content.read(0, 1 << 16), content.size
  tail = content.read(max(0, size - (1 << 16)), 1 << 16)
  return zlib.crc32(tail, zlib.crc32(head + str(size).encode()))


def open_raw(path: str | pathlib.Path) -> IO[bytes]:
  """Opens a file, or an address, for raw reading."""
  if is_address(str(path)):
    return scheme_of(str(path)).open(str(path))
  return open(path, 'rb')


def size_of(path: str | pathlib.Path) -> int:
  """Returns the size in bytes of a file, or of one at an address."""
  if is_address(str(path)):
    return content_of(str(path)).size
  return os.stat(path).st_size


def expanded(names: Sequence[str], strict: bool = True) -> list[str]:
  """File names with the patterns among them (data/*.jsonl) replaced by their matches, sorted.

  Raises UserError if a pattern matches nothing, and `strict` is set.

  Args:
    names: Names of files; of datasets ('hf:…'), which are returned unchanged; or of what an
      extension copies to files.
    strict: Whether a pattern that matches nothing is an error; otherwise it is kept.
  """
  found: list[str] = []
  for name in map(os.path.expanduser, names):  # shells do not expand --fdl.NAME=~/a.txt
    if copies := extensions.hint('files', name):
      found += copies
      continue
    if is_address(name):
      matches = _matches(name)
      if strict and not matches:
        raise UserError(f'{name} matches no object')
      found += matches or [name]
      continue
    if not glob.has_magic(name) or ':' in name.partition('/')[0] or os.path.exists(name):
      found.append(name)
      continue
    matches = sorted(glob.glob(name, recursive=True))
    if strict and not matches:
      raise UserError(f'{name} matches no file')
    found += matches or [name]
  return found


def _matches(pattern: str) -> list[str]:
  """Returns the addresses that match a pattern such as s3://bucket/data/*.jsonl, sorted.

  A star matches a slash too, as ** does for files.
  """
  if not glob.has_magic(pattern):
    return [pattern]
  scheme = scheme_of(pattern)
  magic = re.search(r'[*?[]', pattern := scheme.checked(pattern))
  assert magic is not None
  base = pattern[: pattern.rindex('/', 0, magic.start()) + 1]
  found = (base + name for name in scheme.names(base))
  return sorted(address for address in found if fnmatch.fnmatchcase(address, pattern))


def open_bytes(path: str, raw: IO[bytes] | None = None) -> IO[bytes]:
  """Opens `path` for reading; .gz, .xz and .zst are decompressed on the way.

  Raises UserError if the path is no readable file, or a package for its compression is missing.

  Args:
    raw: The same file, already open, for a caller that watches how far it has been read.
  """
  file = pathlib.Path(path)
  check_file(path)
  if raw is None:
    try:
      raw = open_raw(path)
    except OSError as e:
      raise UserError(f'{path} cannot be read: {e.strerror}') from None
  if file.suffix == '.gz':
    return cast(IO[bytes], gzip.open(raw, 'rb'))
  if file.suffix == '.xz':
    _check_window(path, raw)
    return cast(IO[bytes], lzma.open(raw, 'rb'))
  if file.suffix == '.zst':
    try:
      import zstandard
    except ImportError:
      raise UserError(
        f'{path}: reading .zst needs the package zstandard (pip install zstandard)'
      ) from None
    return io.BufferedReader(ZstdReader(raw, zstandard), 1 << 20)
  return raw


def _check_window(path: str, raw: IO[bytes]) -> None:
  """Raises UserError if a .xz file needs too much memory, whatever it holds."""
  most = most_window()
  head = raw.read(1 << 12)
  raw.seek(0)
  try:
    lzma.LZMADecompressor(memlimit=most + _XZ_BYTES).decompress(head, max_length=1)
  except lzma.LZMAError as e:
    if 'limit' in str(e):
      raise UserError(
        f'{path} needs a window of more than {most >> 20:,} MiB: compress it again with xz -9, or '
        'decompress it with xz -d'
      ) from None


def head_of(path: str, size: int) -> bytes:
  """The first `size` bytes of a file, decompressed and without a byte order mark.

  Raises UserError if the file cannot be read.
  """
  try:
    with open_bytes(path) as f:
      return f.read(size).removeprefix(BOM)
  except _DAMAGED as e:
    raise UserError(f'{path} cannot be read: {e}') from None


def text_or_file(given: str) -> str:
  """Returns the text of the file called `given`, or else `given`, which is the text itself.

  Whatever takes a text or a file reads it by this rule: what has no braces and no line breaks, and
  names an existing file or an object of a store, is that file. Raises UserError if the file cannot
  be read, or the name ends as that of a file that does not exist.
  """
  if not given.strip() or '{' in given or '\n' in given:
    return given
  path = paths.stored(given)
  if is_address(path) or os.path.isfile(path):
    return read_text(path)
  if os.path.splitext(path)[1] in _OF_TEXTS:
    raise UserError(f'the file {given} does not exist: name another one, or give the text itself')
  return given


def read_text(path: str) -> str:
  """The entire text of a UTF-8 file, without a byte order mark.

  Raises:
    UserError: The file is empty, damaged, not UTF-8 (the byte is named), or does not fit in memory.
  """
  most = (host_memory.available() or 1 << 62) // 2  # the text and its bytes are in memory at once
  data = bytearray()
  try:
    with open_bytes(path) as f:
      while part := f.read(_TEXT_BYTES):
        data += part
        if len(data) > most:
          raise UserError(
            f'{path} holds more than {most >> 20:,} MiB of text, which does not fit in memory as '
            'a whole: convert it to JSON Lines, which are read one by one'
          )
  except _DAMAGED as e:
    raise UserError(f'{path} cannot be decompressed: {e}') from None
  if not data:
    raise UserError(f'{path} is empty')
  try:
    return data.removeprefix(BOM).decode('utf-8')
  except UnicodeDecodeError as e:
    at = e.start + (len(BOM) if data.startswith(BOM) else 0)
    line = data.count(b'\n', 0, at) + 1
    raise UserError(f'{path}:{line} is not UTF-8 (byte {at}: 0x{data[at]:02x})') from None


def kind(path: str) -> str:
  """The suffix that says what a file holds: '.txt' for corpus.txt.xz."""
  suffixes = [s.lower() for s in pathlib.Path(path).suffixes if s not in COMPRESSED]
  return suffixes[-1] if suffixes else ''


def lines(path: str) -> Iterator[tuple[int, bytes]]:
  """The lines of a file that are not blank, numbered from 0.

  Raises UserError if the file is empty or damaged.
  """
  for first, _, block in line_blocks(path):
    yield from lines_of(block, first)


def line_blocks(path: str, raw: IO[bytes] | None = None) -> Iterator[tuple[int, int, bytes]]:
  """Splits a file into blocks of about half a megabyte; each ends at the end of a line.

  Yields the number of a block's first line, the number of the first line after it, and the block.
  `raw` has the same meaning as for open_bytes. Raises UserError if the file is empty or damaged.
  """
  done = 0
  rest: list[bytes] = []
  try:
    with open_bytes(path, raw) as f:
      while data := f.read(_BLOCK_BYTES):
        end = data.rfind(b'\n') + 1
        if not end:  # a line that is longer than a block
          rest.append(data)
          _check_line(path, done, sum(map(len, rest)))
          continue
        block = b''.join([*rest, data[:end]])
        rest = [data[end:]]
        after = done + block.count(b'\n')
        yield done, after, block
        done = after
  except _DAMAGED as e:
    raise UserError(f'{path} cannot be read beyond line {done + 1}: {e}') from None
  if last := b''.join(rest):
    yield done, done + 1, last
  elif not done:
    raise UserError(f'{path} is empty')


def line_ranges(path: str, start: int) -> Iterator[tuple[int, int, int, int]]:
  """Finds the blocks of an uncompressed file from line `start` on, without returning their bytes.

  Yields the number of a block's first line, the number of the first line after it, and the byte
  positions in the file at which the block begins and ends. Raises UserError if the file is empty.
  """
  buffer = bytearray(_BLOCK_BYTES)
  first = begin = offset = 0
  with pathlib.Path(path).open('rb', buffering=0) as f:
    while size := f.readinto(buffer):
      end = buffer.rfind(b'\n', 0, size) + 1
      after = first + buffer.count(b'\n', 0, end)
      if not end:
        _check_line(path, first, offset + size - begin)
      if first < start < after:
        at = 0
        for _ in range(start - first):
          at = buffer.index(b'\n', at) + 1
        begin, first = offset + at, start
      if end and start < after:
        yield first, after, begin, offset + end
      if end:
        first, begin = after, offset + end
      offset += size
  if begin < offset and start <= first:
    yield first, first + 1, begin, offset
  if not offset:
    raise UserError(f'{path} is empty')


def _check_line(path: str, number: int, size: int) -> None:
  if size > _LINE_BYTES:
    raise UserError(
      f'{path}:{number + 1} is a line of more than {_LINE_BYTES >> 20} MiB, which cannot be '
      'a record'
    )


def lines_of(block: bytes, first: int) -> Iterator[tuple[int, bytes]]:
  """The lines of a block that are not blank, numbered from `first`, without a byte order mark."""
  if first == 0:
    block = block.removeprefix(BOM)
  for number, line in enumerate(block.split(b'\n'), first):
    if line and not line.isspace():
      yield number, line
