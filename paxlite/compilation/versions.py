"""The versions of the software and the devices that a run uses."""

import functools
import pathlib
import platform
import zlib
from collections.abc import Iterable
from typing import Any

import jax

import paxlite
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.parallel import devices


def versions() -> JsonObject:
  """Describes the environment of this run: Python, packages and devices."""
  import importlib.metadata

  packages = ('paxlite', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'fiddle', 'numpy')
  found = {}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = 'not installed as a package'
  config: Any = jax.config  # JAX declares no option of it
  return {
    'python': platform.python_version(), 'packages': found, 'devices': devices.described(),
    'processes': jax.process_count(),
    'jax_threefry_partitionable': bool(config.jax_threefry_partitionable),
  }  # fmt: skip


@functools.cache
def code_of_paxlite() -> str:
  """Returns a checksum of paxlite's source."""
  return checksum(sorted(pathlib.Path(paxlite.__file__).parent.rglob('*.py')))


def checksum(paths: Iterable[pathlib.Path]) -> str:
  """Returns a checksum of the names and contents of files; UserError if one cannot be read."""
  found = 0
  for path in paths:
    try:
      found = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), found))
    except OSError as e:
      raise UserError(f'{path} cannot be read: {e.strerror or e}') from None
  return f'{found:08x}'
