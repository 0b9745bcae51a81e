"""Machines to compile for, which need not be present, with data of their chips and topologies."""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.files.json_files import read_object
from paxlite.parallel import devices
from paxlite.stores import object_copies

if TYPE_CHECKING:
  import jax


@dataclasses.dataclass(frozen=True)
class Chip:
  """The capacity and speed of one device, in bytes and seconds.

  Attributes:
    name: The name in a target.
    peak_flops: Peak bf16 FLOP/s of dense matrices.
    peak_flops_8bit: The same with operands of 8 bits, by their types in HLO; empty where such
      operands are no faster.
    measured_flops: FLOP/s that were measured, by the types of the operands in HLO.
    memory: Bytes that programs can use.
    memory_bandwidth: Bytes/s.
    ici_bandwidth: Bytes/s that a device sends to its neighbors along one mesh axis, over two links
      of a TPU's torus or the whole NVLink of a GPU.
    dcn_bandwidth: Bytes/s that a device sends to other slices or hosts, as its share of the host's
      network.
    source: The source of the numbers.
    default_share: The share of the device's memory that JAX allocates by default.
    host_bandwidth: Bytes/s between a device and its host, each way; 0 where it is not known.
  """

  name: str
  peak_flops: float
  memory: int
  memory_bandwidth: float
  ici_bandwidth: float
  dcn_bandwidth: float
  source: str
  default_share: float = 1.0
  host_bandwidth: float = 0.0
  peak_flops_8bit: Mapping[str, float] = dataclasses.field(default_factory=dict)
  measured_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def platform(self) -> Literal['gpu', 'tpu']:
    return 'gpu' if self.name == 'h100' else 'tpu'

  @property
  def flops_by_type(self) -> dict[str, float]:
    """Peak FLOP/s by the type of the operands; '' is every other type."""
    float32 = {'f32': self.peak_flops / 2} if self.platform == 'gpu' else {}  # TF32
    return {'': self.peak_flops, **float32, **self.peak_flops_8bit, **self.measured_flops}


GIB = 1 << 30
_TPU = 'Google Cloud TPU documentation; memory as its compiler says'
CHIPS = {
  chip.name: chip
  for chip in (
    Chip('v5e', 197e12, int(15.75 * GIB), 819e9, 100e9, 3.1e9, _TPU, 1.0, 0.0, {'s8': 394e12}),
    Chip('v5p', 459e12, int(95.74 * GIB), 2765e9, 200e9, 6.25e9, _TPU, 1.0, 0.0, {'s8': 918e12}),
    Chip('v6e', 918e12, int(31.25 * GIB), 1638e9, 200e9, 3.1e9, _TPU, 1.0, 0.0, {'s8': 1836e12}),
    Chip(
      'h100', 989e12, 84_929_347_584, 3352e9, 450e9, 50e9,
      'NVIDIA H100 SXM data sheet; 400 Gb/s InfiniBand a GPU', default_share=0.75,
      host_bandwidth=64e9,
      peak_flops_8bit=dict.fromkeys(('f8e4m3fn', 'f8e5m2', 's8'), 1979e12),
    ),
  )
}  # fmt: skip

# what JAX calls a device, and its chip
_KINDS = {'H100': 'h100', 'TPU v5 lite': 'v5e', 'TPU v5e': 'v5e', 'TPU v5p': 'v5p',
          'TPU v5': 'v5p', 'TPU v6': 'v6e'}  # fmt: skip


def chip_of_kind(kind: str) -> Chip | None:
  """Returns the chip of a device by JAX's name of its kind; None if it is not known."""
  return next((CHIPS[chip] for name, chip in _KINDS.items() if name in kind), None)


def one_of(chip: Chip) -> str:
  """Returns the name of the smallest target with such a chip."""
  return 'h100x1' if chip.name == 'h100' else f'{chip.name}-{slice_sizes(chip.name)[0]}'


# the available shapes of a slice, by number of chips
_GRIDS = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
_CUBES = {
  4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8',
  512: '8x8x8', 1024: '8x8x16', 2048: '8x16x16', 3072: '12x16x16',
}  # fmt: skip

_GPUS_PER_HOST = 8

# description of an H100 SXM for XLA, with its limits, clock rate and bandwidth
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Target:
  """A machine to compile for.

  Attributes:
    name: The name that the user wrote.
    chip: The chip of every device; None means the devices of this machine.
    devices: Number of devices.
    slices: Number of TPU slices.
  """

  name: str
  chip: Chip | None
  devices: int
  slices: int = 1

  def topology(self) -> list['jax.Device']:
    """Returns the devices of the target; only the devices of `here` can run programs.

    Raises:
      UserError: The package with the compiler for the devices is not installed.
    """
    from jax.experimental import topologies

    if self.chip is None:
      return devices.present()
    try:
      if self.chip.name == 'h100':
        _tell_jax_that_gpus_are_hopper()
        hosts = max(self.devices // _GPUS_PER_HOST, 1)
        found = topologies.get_topology_desc(
          platform='cuda',
          topology_name='h100',
          target_config=_H100,
          topology=f'1x{hosts}x{self.devices // hosts}',
        )
      else:
        grid = _shapes(self.chip.name)[self.devices // self.slices]
        slices: dict[str, int] = {'num_slices': self.slices} if self.slices > 1 else {}
        found = topologies.get_topology_desc(
          platform='tpu', topology_name=f'{self.chip.name}:{grid}', **slices
        )
    except RuntimeError as e:  # the plugin of the platform is missing
      extra = 'cuda' if self.chip.name == 'h100' else 'tpu'
      raise UserError(
        f'--target={self.name} needs the compiler of {shell.install(extra)}, and no '
        f'such device: {str(e).splitlines()[0][:80]}'
      ) from None
    return list(found.devices)


def parse(name: str, calibration: str | None = None) -> Target:
  """Returns the target called `name`, such as v5e-256, 2xv5e-256, v5p-128, h100x8 or here.

  Google counts cores for v5p: v5p-128 has 128 cores, which are 64 chips and devices.

  Args:
    name: The name.
    calibration: A file with measured speeds of its chip, which replace those of the data sheet.

  Raises:
    UserError: There is no such machine, or the file is of another one.
  """
  target = _parse(name)
  if calibration is None or target.chip is None:
    return target
  return dataclasses.replace(target, chip=calibrated(target.chip, calibration))


def calibrated(chip: Chip, path: str) -> Chip:
  """Returns a chip with the measured speeds of a file.

  The file is a JSON object: `chip` is the name of the chip, `flops` has FLOP/s by the types of the
  operands in HLO (bf16, f32, f8e4m3fn …). memory_bandwidth, ici_bandwidth, dcn_bandwidth, and
  host_bandwidth between a device and its host (each way) are in bytes/s. What it does not have
  stays as the data sheet says.

  Raises:
    UserError: The file cannot be read, is of another chip, or has a speed that is none.
  """
  found = read_object(pathlib.Path(object_copies.local(path)))
  speeds = ('memory_bandwidth', 'ici_bandwidth', 'dcn_bandwidth', 'host_bandwidth')
  if unknown := sorted(found.keys() - {'chip', 'flops', 'source', *speeds}):
    raise UserError(
      f'--calibration={path}: {unknown[0]} is not a key of this file: use chip, flops, '
      f'{", ".join(speeds)}'
    )
  if found.get('chip') != chip.name:
    raise UserError(
      f'--calibration={path} is of {found.get("chip")}, and the target of {chip.name}'
    )
  flops = found.get('flops', {})
  numbers = {**(flops if isinstance(flops, dict) else {'flops': None})}
  numbers |= {name: found[name] for name in speeds if name in found}
  for name, value in numbers.items():
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
      raise UserError(f'--calibration={path}: {name}={value} must be a number of FLOP/s or bytes/s')
  changes: dict[str, Any] = {name: float(found[name]) for name in speeds if name in found}
  measured = {name: float(value) for name, value in flops.items()}
  if 'bf16' in measured:
    changes['peak_flops'] = measured.pop('bf16')
  source = f'{path}; otherwise {chip.source}'
  return dataclasses.replace(chip, measured_flops=measured, source=source, **changes)


def _parse(name: str) -> Target:
  """Returns the target, with the numbers of its data sheet."""
  if name == 'here':
    return Target(name, None, len(devices.present()))
  if match := re.fullmatch(r'h100x(\d+)', name):
    count = int(match[1])
    if count < 1 or (count > _GPUS_PER_HOST and count % _GPUS_PER_HOST):
      raise UserError(f'--target={name}: hosts have {_GPUS_PER_HOST} GPUs')
    return Target(name, CHIPS['h100'], count)
  if match := re.fullmatch(r'(?:(\d+)x)?(v5e|v5p|v6e)-(\d+)', name):
    slices, chip, size = int(match[1] or 1), match[2], int(match[3])
    cores = 2 if chip == 'v5p' else 1
    if slices < 1 or size not in slice_sizes(chip):
      known = ', '.join(map(str, slice_sizes(chip)))
      raise UserError(f'--target={name}: a slice of {chip} has one of {known}')
    return Target(name, CHIPS[chip], slices * (size // cores), slices)
  raise UserError(
    f'--target={name}: write v5e-256, 2xv5e-256 (two slices), v5p-128, v6e-256, h100x8, h100x256, '
    'or here for the devices that are present'
  )


def slice_sizes(chip: str) -> list[int]:
  """Returns the sizes of a slice of TPUs as they are in its name, smallest first."""
  cores = 2 if chip == 'v5p' else 1
  return [chips * cores for chips in _shapes(chip)]


def with_network(target: Target, gigabytes: str) -> Target:
  """Returns a target whose hosts send `gigabytes` 10⁹ bytes a second to each other.

  Raises:
    UserError: The text is no number above 0, or the target has no hosts with GPUs.
  """
  try:
    speed = float(gigabytes)
  except ValueError:
    speed = math.nan
  if not 0 < speed < math.inf:
    raise UserError(f'--network={gigabytes} must be GB/s of a host, such as --network=50')
  if target.chip is None or target.chip.platform != 'gpu':
    raise UserError(f'--network is for targets with GPUs, such as h100x256, not {target.name}')
  chip = dataclasses.replace(
    target.chip,
    dcn_bandwidth=speed * 1e9 / _GPUS_PER_HOST,
    source=f'{target.chip.source.partition(";")[0]}; {speed:g} GB/s a host from --network',
  )
  return dataclasses.replace(target, chip=chip)


def _shapes(chip: str) -> dict[int, str]:
  return _CUBES if chip == 'v5p' else _GRIDS


def _tell_jax_that_gpus_are_hopper() -> None:
  """Makes JAX trace cuDNN's attention for the target: it asks the local device what it can do."""
  import jax
  from jax._src.cudnn import fused_attention_stablehlo as attention

  if jax.default_backend() == 'cpu':
    is_hopper: Any = lambda capability: tuple(map(int, capability.split('.'))) <= (9, 0)
    attention.check_compute_capability = is_hopper


def prepare_environment() -> None:
  """Sets environment variables for compiling without devices, and with several compilers at a time.

  They take effect only if they are set before JAX is imported.
  """
  os.environ.update(
    JAX_PLATFORMS='cpu',
    TPU_SKIP_MDS_QUERY='1',
    TPU_WORKER_HOSTNAMES='localhost',
    TPU_ACCELERATOR_TYPE='v5litepod-4',
    ALLOW_MULTIPLE_LIBTPU_LOAD='1',
  )
