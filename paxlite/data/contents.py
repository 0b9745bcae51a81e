"""Checksums of what data hold, whatever they are called and wherever they are.

Checksums of files have 32 bits. Those of datasets have 57, and so has what is combined with one. In
checkpoints of earlier versions, datasets have 32 bits, of their names and sizes.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from paxlite.files.schemes import is_address
from paxlite.files.text_files import fingerprint_of

_WIDE = 1 << 56
_MOST_FILES = 64  # of a dataset that are looked into
_STATED = 'blob_id', 'ETag', 'etag'  # what stores call a checksum of a file


def checksum(*contents: object) -> int:
  """Returns a checksum of values with a stable repr, of 57 bits."""
  digest = hashlib.blake2b(repr(contents).encode('utf-8', 'surrogatepass'), digest_size=7).digest()
  return int.from_bytes(digest, 'little') | _WIDE


def combined(found: Iterable[int | None]) -> int:
  """Returns the checksum of several, in their order; None: that of a part is not known."""
  parts = list(found)
  if all(part is None or part < _WIDE for part in parts):
    return zlib.crc32(repr(parts).encode())
  return checksum(parts)


def can_compare(one: Any, other: Any) -> Any:
  """Returns whether two checksums, or arrays of them, are computed by the same rule."""
  return (one >= _WIDE) == (other >= _WIDE)


def differ(one: Any, other: Any) -> Any:
  """Returns whether two checksums, or arrays of them, tell of other contents."""
  return (one != other) & can_compare(one, other)


def of_files(names: Sequence[str]) -> int:
  """Returns a checksum of the files of a dataset, in their order.

  It covers their number, the size of each file on this machine, and both ends of up to 64 files, or
  what their store states of them.

  Raises:
    OSError, UserError: A file cannot be read.
  """
  count = len(names)
  looked_at = {i * (count - 1) // (_MOST_FILES - 1) for i in range(_MOST_FILES)}
  return checksum(
    [os.path.getsize(name) for name in names if '://' not in name],
    [_of_file(name) for i, name in enumerate(names) if count <= _MOST_FILES or i in looked_at],
  )


def _of_file(name: str) -> object:
  if '://' not in name or is_address(name):
    return fingerprint_of(name)
  import fsspec

  files, path = fsspec.core.url_to_fs(name)
  about = files.info(path)
  return about.get('size'), next((str(about[key]) for key in _STATED if about.get(key)), None)
