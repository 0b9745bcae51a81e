"""The versions of the software and the devices that a run uses."""

import platform
from typing import Any

import jax

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
    'python': platform.python_version(),
    'packages': found,
    'devices': devices.described(),
    'processes': jax.process_count(),
    'jax_threefry_partitionable': bool(config.jax_threefry_partitionable),
  }
