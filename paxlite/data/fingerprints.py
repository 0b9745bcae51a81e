"""What an input reads, as one number that is kept with checkpoints."""

import zlib

from paxlite.data.base import Input, RowInput
from paxlite.data.mixture import MixtureInput
from paxlite.data.streams import StreamInput


def fingerprint(data: Input) -> int | None:
  """The same on every host, and another where the data changes; None where it is not known.

  Batch size, order and the length of the run are not in it. Sources and inputs of one's own have
  it as an attribute, or have none.
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
