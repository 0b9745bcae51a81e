"""The machine that is planned for, in the numbers that the planner uses."""

import dataclasses
import os
import platform
from collections.abc import Mapping

from paxlite.aot.chips import Chip
from paxlite.aot.targets import Target
from paxlite.core.json_text import Json

_OF_GPUS = 0.92  # share of a GPU's memory; CUDA, NCCL and the allocator need the rest


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices and their speeds, in bytes and seconds.

  Attributes:
    name: The target as the user wrote it.
    platform: cpu, gpu or tpu.
    devices: Number of devices.
    near: Devices of one host or slice.
    memory: Bytes of a device that a step may use.
    flops: FLOP/s that a device reaches by the type of the operands in HLO; '' is every other type.
    bandwidth: Bytes/s of main memory that it reaches.
    ici: Bytes/s that a device sends within a host or slice.
    dcn: Bytes/s that a device sends to other hosts or slices.
    host: Bytes/s between a device and its host, each way; 0 if that is not known.
    measured: Whether steps are run here instead of estimated.
    share: The share of the memory that JAX has to be given, if that is not its default.
    chip: The name of the chip; '' for a CPU.
    calibration: What the speeds owe to the measured steps of a run; '' if there is none.
  """

  name: str
  platform: str
  devices: int
  near: int
  memory: float
  flops: Mapping[str, float]
  bandwidth: float
  ici: float
  dcn: float
  host: float = 0.0
  measured: bool = False
  share: float | None = None
  chip: str = ''
  calibration: str = ''

  @property
  def hosts(self) -> int:
    """Number of hosts or slices."""
    return self.devices // self.near

  @property
  def identity(self) -> str:
    """The text that verdicts depend on: for `here` the machine's name, for others its speeds."""
    if self.measured:
      return f'{platform.node()}: {self.devices} × {self.platform}, {os.cpu_count()} cores'
    return str(dataclasses.replace(self, memory=0.0, share=None, calibration=''))


def of_target(target: Target) -> Machine:
  """Returns the machine of a target other than here."""
  chip = target.chip
  assert chip is not None
  gpus = chip.platform == 'gpu'
  near = target.devices // target.slices
  slower = chip.slower
  return Machine(
    name=target.name,
    platform=chip.platform,
    devices=target.devices,
    near=min(target.devices, chip.domain) if gpus else near,
    memory=chip.memory * (_OF_GPUS if gpus else 1.0),
    flops={dtype: flops / slower for dtype, flops in chip.reached_flops.items()},
    bandwidth=chip.reached_bandwidth / slower,
    ici=chip.ici_bandwidth / slower,
    dcn=chip.dcn_bandwidth / slower,
    host=chip.host_bandwidth / slower,
    share=_OF_GPUS if gpus else None,
    chip=chip.name,
    calibration='' if chip.step is None else chip.step.sentence(),
  )


def of_description(described: Mapping[str, Json], chip: Chip | None) -> Machine:
  """Returns the machine of the devices that are here, as a process on it has described them.

  Args:
    described: platform, devices, near, memory, flops and bandwidth.
    chip: The data sheet of such a device, if it is known.
  """
  flops = {'': float(described['flops'])} if chip is None else chip.reached_flops
  bandwidth = float(described['bandwidth'])
  return Machine(
    name='here',
    platform=described['platform'],
    devices=described['devices'],
    near=described['near'],
    memory=float(described['memory']),
    flops=flops,
    bandwidth=bandwidth if chip is None else chip.reached_bandwidth,
    ici=bandwidth / 4 if chip is None else chip.ici_bandwidth,
    dcn=bandwidth / 16 if chip is None else chip.dcn_bandwidth,
    host=0.0 if chip is None else chip.host_bandwidth,
    measured=True,
    chip='' if chip is None else chip.name,
  )
