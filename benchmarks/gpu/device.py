"""Describes the device before the cases: its name, memory and speed, and the installed packages.

Each probe runs in a separate process, because a library may crash the process that loads it.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.cases import BANDWIDTHS

Result = dict[str, Any]

PACKAGES = (
  'jax',
  'jaxlib',
  'jax-cuda12-plugin',
  'jax-cuda13-plugin',
  'flax',
  'optax',
  'numpy',
  'transformer_engine',
  'qwix',
  'torch',
  'transformers',
)
TINY_MEMORY = 5_800_000  # for --tiny, small enough that it must search for a number of layers


def describe(tiny: bool) -> Result:
  """Returns the device, the versions of all packages, and the speed of products and copies."""
  import jax

  from paxlite.parallel import devices

  device = jax.devices()[0]
  capability = getattr(device, 'compute_capability', None)
  size, flops = matmul_flops(256 if tiny else 8192)
  return {
    'tiny': tiny,
    'device': device.device_kind,
    'platform': device.platform,
    'devices': jax.device_count(),
    'capability': None if capability is None else float(capability),
    'memory': memory_limit(device, tiny),
    'driver': driver(),
    'python': sys.version.split()[0],
    'versions': {p: v for p in PACKAGES if (v := version(p))},
    'peak_flops': devices.peak_flops(device.device_kind),
    'peak_bandwidth': peak_bandwidth(device.device_kind),
    'matmul': {'size': size, 'dtype': 'bfloat16', 'flops': flops},
    'float32_flops': matmul_flops(size // 2, 'float32')[1],
    'copy': copy_bandwidth(
      2**22 if tiny else min(2**32, (memory_limit(device, tiny) or 2**35) // 8)
    ),
  }


def version(package: str) -> str | None:
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    return importlib.metadata.version(package)
  return None


def load_transformer_engine(tiny: bool) -> Result:
  del tiny
  from paxlite.transformer_engine import products

  products.transformer_engine()
  return {}


def load_qwix(tiny: bool) -> Result:
  del tiny
  importlib.import_module('qwix')
  return {}


def find_transformers(tiny: bool) -> Result:
  """Finds transformers and torch without loading them, which would take long."""
  del tiny
  for module in ('torch', 'transformers'):
    if importlib.util.find_spec(module) is None:
      raise ModuleNotFoundError(f'No module named {module}')
  return {}


PROBES: dict[str, Callable[[bool], Result]] = {
  'device': describe,
  'transformer_engine': load_transformer_engine,
  'qwix': load_qwix,
  'transformers': find_transformers,
}


def driver() -> str | None:
  """Returns the driver's version and the GPU's power limit, if nvidia-smi reports them."""
  command = ['nvidia-smi', '--query-gpu=driver_version,power.limit', '--format=csv,noheader']
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return told.strip().splitlines()[0]
  return None


def memory_limit(device: Any, tiny: bool) -> int | None:
  """Returns the bytes that JAX may use on the device; None if unknown, as on a CPU."""
  if tiny:
    return TINY_MEMORY
  return (device.memory_stats() or {}).get('bytes_limit')


def peak_bandwidth(device_kind: str) -> float | None:
  """Returns the bytes/s of a device's memory by its data sheet; None if unknown."""
  for name, found in BANDWIDTHS.items():
    if re.search(rf'\b{name}\b', device_kind, re.IGNORECASE):
      return found
  return None


def calibration(result: Result) -> Result:
  """Returns the measured speeds as paxlite.aot.chips reads them; networks are not measured."""
  from paxlite.aot import chips

  chip = chips.chip_of_kind(result['device'])
  return {
    'chip': result['device'] if chip is None else chip.name,
    'source': f'python -m benchmarks.gpu on {result["device"]}',
    'flops': {'bf16': result['matmul']['flops'], 'f32': result['float32_flops']},
    'memory_bandwidth': result['copy']['bandwidth'],
  }


def matmul_flops(size: int, dtype: str = 'bfloat16') -> tuple[int, float]:
  """Returns (size, FLOP/s) of a square product of random numbers; zeros are faster."""
  import jax
  import jax.numpy as jnp

  a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
  return size, 2 * size**3 / median_seconds(jax.jit(jnp.dot), a, b)


def copy_bandwidth(size: int) -> Result:
  """Returns the bytes/s of reading and writing an array of `size` bytes; adding 1 costs no time."""
  import jax
  import jax.numpy as jnp

  x = jnp.arange(size // 4, dtype=jnp.uint32)
  return {'bytes': size, 'bandwidth': 2 * size / median_seconds(jax.jit(lambda x: x + 1), x)}


def median_seconds(function: Callable[..., Any], *arguments: Any) -> float:
  """Returns the median seconds of a call; ten calls are waited for together."""
  function(*arguments).block_until_ready()
  seconds = []
  for _ in range(5):
    before = time.perf_counter()
    for _ in range(10):
      result = function(*arguments)
    result.block_until_ready()
    seconds.append((time.perf_counter() - before) / 10)
  return statistics.median(seconds)
