"""The machine that is planned for, in the numbers that the planner uses."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paxlite.aot import chips
from paxlite.aot.chips import Chip
from paxlite.aot.targets import Target
from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.parallel import devices

if TYPE_CHECKING:
  import jax

# of a CPU, only the order of the estimates counts, because its steps are run
_CPU = Chip('cpu', 1e11, 0, 1e10, 2.5e9, 6e8, 'nominal')
_OF_GPUS = 0.92  # share of a GPU's memory; CUDA, NCCL and the allocator need the rest


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices and their speeds."""

  name: str  # as the user wrote it
  platform: str  # cpu, gpu or tpu
  devices: int
  near: int  # devices of one host or slice
  memory: float  # bytes of a device that a step may use
  chip: Chip

  @property
  def measured(self) -> bool:
    """Whether steps are run instead of compiled."""
    return self.name == 'here'

  @property
  def share(self) -> float | None:
    """The share of the memory that JAX has to be given, if that is not its default."""
    return _OF_GPUS if self.platform == 'gpu' and not self.measured else None

  def __str__(self) -> str:
    chip = self.platform if self.measured else re.sub(r'[x-].*', '', self.name)
    return f'{self.devices} × {chip}'


def of_target(target: Target) -> Machine:
  """Returns the machine of a target other than here."""
  chip = target.chip
  assert chip is not None
  is_gpu = chip.platform == 'gpu'
  near = min(target.devices, chip.domain) if is_gpu else target.devices // target.slices
  memory = chip.memory * (_OF_GPUS if is_gpu else 1.0)
  return Machine(target.name, chip.platform, target.devices, near, memory, chip)


def here() -> Machine:
  """Returns the machine of the devices that are here.

  Raises UserError if they are GPUs or TPUs whose data sheet is not known.
  """
  found = devices.present()
  kind, platform = found[0].device_kind, {'cpu': 'cpu', 'tpu': 'tpu'}.get(found[0].platform, 'gpu')
  chip = _CPU if platform == 'cpu' else chips.chip_of_kind(kind)
  if chip is None:
    raise UserError(f'--target=here: {kind} is unknown, so no estimate is possible')
  memory = min((d.memory_stats() or {}).get('bytes_limit', 1 << 34) for d in found)
  if platform == 'cpu':
    memory = (host_memory.available() or 1 << 34) / len(found)
  return Machine('here', platform, len(found), near_devices(found), float(memory), chip)


def near_devices(found: Sequence['jax.Device']) -> int:
  """Returns how many of all devices belong to the process of the first one."""
  return sum(d.process_index == found[0].process_index for d in found)
