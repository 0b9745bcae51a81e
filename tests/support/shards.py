"""Parts of the exhaustive tests: `make test-exhaustive SHARD=i/n`."""

import re
import zlib
from collections.abc import Sequence

import pytest


def parsed(text: str) -> tuple[int, int]:
  """Returns (part, parts) of I/N; raises pytest.UsageError for another text."""
  found = re.fullmatch(r'(\d+)/(\d+)', text)
  if found is None or not 1 <= int(found[1]) <= int(found[2]):
    raise pytest.UsageError(f'--shard={text}: give I/N with 1 ≤ I ≤ N, such as 3/12')
  return int(found[1]), int(found[2])


def chosen(items: Sequence[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
  """Returns the items of one part: those whose names have its checksum."""
  return [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
