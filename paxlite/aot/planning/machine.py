"""The machine that is planned for, in the numbers that the planner uses."""

import dataclasses
import os
import platform
import re
from collections.abc import Mapping

from paxlite.aot import chips
from paxlite.aot.chips import Chip
from paxlite.aot.targets import Target
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json

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
  def host(self) -> float:
    """Bytes/s between a device and its host, each way; 0 if that is not known."""
    return self.chip.host_bandwidth

  @property
  def measured(self) -> bool:
    """Whether steps are run instead of compiled."""
    return self.name == 'here'

  @property
  def share(self) -> float | None:
    """The share of the memory that JAX has to be given, if that is not its default."""
    return _OF_GPUS if self.platform == 'gpu' and not self.measured else None

  @property
  def identity(self) -> str:
    """The text that verdicts depend on: for `here` the machine's name, for others its speeds."""
    if self.measured:
      return f'{platform.node()}: {self.devices} × {self.platform}, {os.cpu_count()} cores'
    return str(dataclasses.replace(self, memory=0.0))

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


def of_description(described: Mapping[str, Json]) -> Machine:
  """Returns the machine of the devices that are here, as a process on it has described them.

  Args:
    described: platform, kind, devices, near, memory, flops and bandwidth.

  Raises:
    UserError: They are GPUs or TPUs whose data sheet is not known.
  """
  kind, memory, speed = described['kind'], float(described['memory']), float(described['bandwidth'])
  chip = chips.chip_of_kind(kind)
  if chip is None and described['platform'] != 'cpu':
    raise UserError(f'--target=here: {kind} is not known, so that nothing can be estimated')
  if chip is None:
    flops = float(described['flops'])
    chip = Chip('cpu', flops, int(memory), speed, speed / 4, speed / 16, 'measured here')
  about = 'here', described['platform'], described['devices'], described['near']
  return Machine(*about, memory, chip)
