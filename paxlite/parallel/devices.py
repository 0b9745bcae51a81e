"""The devices that JAX has for this process, and their peak FLOP/s."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paxlite.core import shell
from paxlite.core.errors import UserError

if TYPE_CHECKING:
  import jax

_EXTRAS = {'cuda': 'cuda13', 'gpu': 'cuda13', 'tpu': 'tpu'}
# Dense bf16 FLOP/s per device from the vendors' data sheets. The first name that occurs in the
# device's kind, as complete words, counts.
_PEAK_FLOPS = {
  'A100': 312e12,
  'H100 PCIe': 756e12,
  'H100 NVL': 835e12,
  'H100': 989e12,
  'H200': 989e12,
  'H800': 989e12,
  'GB200': 2500e12,
  'B200': 2250e12,
  'L40S': 362e12,
  'L4': 121e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5p': 459e12,
  'TPU v5': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'TPU7x': 1153.5e12,  # of one of the two devices of a chip
}


def kind(platform: str) -> str:
  """Returns cpu, gpu or tpu for the name of a platform in JAX."""
  return {'cuda': 'gpu', 'rocm': 'gpu'}.get(platform, platform)


def capability(device: 'jax.Device') -> float:
  """Returns the compute capability of a device, 9.0 for Hopper; 0 if it is not an NVIDIA GPU."""
  found = str(getattr(device, 'compute_capability', ''))
  return float(found) if found.replace('.', '', 1).isdigit() else 0.0


def has_sparse_cores(device: 'jax.Device') -> bool:
  """Whether a device is a TPU with SparseCores, which run collectives beside kernels."""
  name = device.device_kind
  return name.startswith(('TPU v5', 'TPU v6', 'TPU7x')) and name not in ('TPU v5 lite', 'TPU v5e')


def present() -> list['jax.Device']:
  """All devices of the run.

  Raises:
    UserError: JAX_PLATFORMS asks for devices that are not present, or whose package is missing.
  """
  import jax

  try:
    return jax.devices()
  except (RuntimeError, AssertionError) as e:  # JAX asserts where its plugin is missing
    asked = os.environ.get('JAX_PLATFORMS', '')
    if not asked:
      raise
    why = f' ({str(e).splitlines()[0]})' if str(e) else ''
    extra = _EXTRAS.get(asked.partition(',')[0])
    package = f', or install what JAX needs for them: {shell.install(extra)}' if extra else ''
    raise UserError(
      f'JAX has no devices of JAX_PLATFORMS={asked} here{why}. Leave JAX_PLATFORMS unset{package}'
    ) from None


def described() -> str:
  """The devices of the run as text."""
  return text(present())


def text(found: Sequence['jax.Device']) -> str:
  """Devices as text: '8 × NVIDIA H100 80GB HBM3 (gpu)', '1 × cpu'."""
  kind, platform = found[0].device_kind, found[0].platform
  return f'{len(found)} × {kind}' + (f' ({platform})' if platform != kind else '')


def peak_flops(device_kind: str) -> float | None:
  """Returns the dense bf16 peak in FLOP/s of JAX's device_kind, or None if unknown (CPUs)."""
  for name, flops in _PEAK_FLOPS.items():
    if re.search(rf'\b{name}\b', device_kind, re.IGNORECASE):
      return flops
  return None
