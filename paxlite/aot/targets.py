"""Machines to compile for, which need not be present, and their topologies."""

import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any

from paxlite.aot.chips import CHIPS, Chip, Gpu, calibrated
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.parallel import devices

if TYPE_CHECKING:
  import jax


NOT_HERE = '--calibration is for other machines: with --target=here, steps are run'


def one_of(chip: Chip) -> str:
  """Returns the name of the smallest target with such a chip."""
  return f'{chip.name}x1' if chip.gpu else f'{chip.name}-{slice_sizes(chip.name)[0]}'


# the available shapes of a slice, by number of chips
_GRIDS = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
_CUBES = {
  4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8',
  512: '8x8x8', 1024: '8x8x16', 2048: '8x16x16', 3072: '12x16x16',
}  # fmt: skip

# what XLA reads of a GPU that is not there
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.kind}"
"""


def _description(chip: Chip) -> str:
  gpu = chip.gpu
  assert gpu is not None
  major, minor = gpu.capability.split('.')
  return _DESCRIPTION.format(
    gpu=gpu, bandwidth=chip.memory_bandwidth, memory=chip.memory, major=major, minor=minor,
    shared=gpu.shared_memory - 1024,  # a block leaves 1 KB to the system
  )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
  """A machine to compile for."""

  name: str  # the name that the user wrote
  chip: Chip | None  # the chip of every device; None means the devices of this machine
  devices: int  # number of devices
  slices: int = 1  # number of TPU slices

  def topology(self) -> list['jax.Device']:
    """Returns the devices of the target; only the devices of `here` can run programs.

    Raises UserError if the package with the compiler for the devices is not installed.
    """
    from jax.experimental import topologies

    if self.chip is None:
      return devices.present()
    try:
      if self.chip.gpu is not None:
        _tell_jax_of_the_gpus(self.chip.gpu)
        hosts = max(self.devices // self.chip.domain, 1)
        found = topologies.get_topology_desc(
          platform='cuda', topology_name=self.chip.name, target_config=_description(self.chip),
          topology=f'1x{hosts}x{self.devices // hosts}',
        )  # fmt: skip
      else:
        grid = _shapes(self.chip.name)[self.devices // self.slices // _devices(self.chip.name)]
        slices: dict[str, int] = {'num_slices': self.slices} if self.slices > 1 else {}
        found = topologies.get_topology_desc(
          platform='tpu', topology_name=f'{self.chip.name}:{grid}', **slices
        )
    except RuntimeError as e:  # the plugin of the platform is missing
      extra = 'cuda' if self.chip.gpu else 'tpu'
      raise UserError(
        f'--target={self.name} needs the compiler of {shell.install(extra)}, and no '
        f'such device: {str(e).splitlines()[0][:80]}'
      ) from None
    return list(found.devices)


def parse(name: str, calibration: str | None = None) -> Target:
  """Returns the target called `name`, such as v5e-256, 2xv5e-256, v5p-128, h100x8 or here.

  Google counts cores for v5p and tpu7x: v5p-128 has 128 cores, which are 64 chips and devices. Each
  core of tpu7x is a device. Raises UserError if there is no such machine, or the file is of another
  one.

  Args:
    calibration: A file with measured speeds of its chip, which replace those of the data sheet.
  """
  target = _parse(name)
  if calibration is None:
    return target
  if target.chip is None:
    raise UserError(NOT_HERE)
  return dataclasses.replace(target, chip=calibrated(target.chip, calibration))


def _parse(name: str) -> Target:
  """Returns the target, with the numbers of its data sheet."""
  if name == 'here':
    return Target(name, None, len(devices.present()))
  if (match := re.fullmatch(r'([a-z]+\d+s?)x(\d+)', name)) and match[1] in _GPUS:
    chip, count = CHIPS[match[1]], int(match[2])
    if _parts_of_hosts(chip, count):
      domain = 'NVLink connects' if chip.domain > 8 else 'hosts have'
      raise UserError(f'--target={name}: {domain} {chip.domain} GPUs')
    return Target(name, chip, count)
  if match := re.fullmatch(rf'(?:(\d+)x)?({"|".join(_TPUS)})-(\d+)', name):
    slices, size = int(match[1] or 1), int(match[3])
    if slices < 1 or size not in slice_sizes(match[2]):
      known = ', '.join(map(str, slice_sizes(match[2])))
      raise UserError(f'--target={name}: a slice of {match[2]} has one of {known}')
    chips = size // _cores(match[2])
    return Target(name, CHIPS[match[2]], slices * chips * _devices(match[2]), slices)
  raise UserError(
    f'--target={name}: write v5e-256, 2xv5e-256 (two slices), h100x8, h100x256, or here for the '
    f'devices that are present. The chips are {", ".join([*_TPUS, *_GPUS])}'
  )


def _parts_of_hosts(chip: Chip, count: int) -> bool:
  """Returns whether GPUs span hosts without filling them."""
  return count < 1 or (count > chip.domain and count % chip.domain != 0)


_TPUS, _GPUS = ([c.name for c in CHIPS.values() if c.platform == kind] for kind in ('tpu', 'gpu'))


def _cores(chip: str) -> int:
  """Returns how much Google counts for a chip in the names of slices."""
  return 2 if chip in ('v5p', 'tpu7x') else 1


def _devices(chip: str) -> int:
  """Returns how many devices of JAX a chip is."""
  return 2 if chip == 'tpu7x' else 1


def slice_sizes(chip: str) -> list[int]:
  """Returns the sizes of a slice of TPUs as they are in its name, smallest first."""
  return [chips * _cores(chip) for chips in _shapes(chip)]


def larger(name: str) -> list[str]:
  """Returns the names of machines with more devices of the same chip, smallest first."""
  target = _parse(name)
  if (chip := target.chip) is None:
    return []
  if chip.platform == 'tpu':
    names = [f'{chip.name}-{n}' for n in slice_sizes(chip.name)]
  else:
    counts = sorted({n << i for n in (1, chip.domain) for i in range(9)})
    names = [f'{chip.name}x{n}' for n in counts if not _parts_of_hosts(chip, n)]
  return [n for n in names if _parse(n).devices > target.devices]


def with_network(target: Target, gigabytes: str) -> Target:
  """Returns a target whose hosts send `gigabytes` 10⁹ bytes a second to each other.

  Raises UserError if the text is no number above 0, or the target has no hosts with GPUs.
  """
  try:
    speed = float(gigabytes)
  except ValueError:
    speed = math.nan
  if not 0 < speed < math.inf:
    raise UserError(f'--network={gigabytes} must be GB/s of a host, such as --network=50')
  if target.chip is None or target.chip.gpu is None:
    raise UserError(f'--network is for targets with GPUs, such as h100x256, not {target.name}')
  chip = dataclasses.replace(
    target.chip,
    dcn_bandwidth=speed * 1e9 / target.chip.gpu.of_host,
    source=f'{target.chip.source.partition(";")[0]}; {speed:g} GB/s a host from --network',
  )
  return dataclasses.replace(target, chip=chip)


def _shapes(chip: str) -> dict[int, str]:
  return _CUBES if _cores(chip) == 2 else _GRIDS


def _tell_jax_of_the_gpus(gpu: Gpu) -> None:
  """Makes JAX trace cuDNN's attention for the target: it asks the local device what it can do."""
  import jax
  from jax._src.cudnn import fused_attention_stablehlo as attention

  if jax.default_backend() == 'cpu':
    number = lambda capability: tuple(map(int, capability.split('.')))
    is_there: Any = lambda capability: number(capability) <= number(gpu.capability)
    attention.check_compute_capability = is_there


def prepare_environment() -> None:
  """Sets environment variables to compile without devices and with parallel compilers.

  They take effect only if they are set before JAX is imported.
  """
  os.environ.update(
    JAX_PLATFORMS='cpu', TPU_SKIP_MDS_QUERY='1', TPU_WORKER_HOSTNAMES='localhost',
    TPU_ACCELERATOR_TYPE='v5litepod-4', ALLOW_MULTIPLE_LIBTPU_LOAD='1',
  )  # fmt: skip
