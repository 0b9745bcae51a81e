"""Identifies the data of an input by one number, which is saved with checkpoints."""

import zlib

from paxlite.data.base import Input, RowInput
from paxlite.data.mixture import MixtureInput
from paxlite.data.streams import StreamInput


def fingerprint(data: Input) -> int | None:
  """Returns the fingerprint of an input's data; None if it is not known.

  It is the same on every host, and changes when the data changes. It does not depend on the batch
  size, the order or the length of the run. User-defined sources and inputs may have it as the
  attribute `fingerprint`.
  """
  if isinstance(data, RowInput):
    return getattr(data.source, 'fingerprint', None)
  if isinstance(data, StreamInput):
    return _combined([part.fingerprint for part in data.source.parts])
  if isinstance(data, MixtureInput):
    return _combined([fingerprint(part) for part in data.parts])
  return getattr(data, 'fingerprint', None)


def _combined(found: list[int | None]) -> int:
  return zlib.crc32(repr(found).encode())
