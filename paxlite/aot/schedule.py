"""The schedule of a compiled program, played at the speeds of a chip.

Instructions run in the order of the text. A kernel takes the longer of its FLOPs and its memory
traffic, at the rates that such kernels reach. A collective takes its bytes at the bandwidth of its
links, and what it reads and writes on the device takes no time of its own. The time between its
start and its end that no kernel fills is exposed. Transfers that are under way at the same time
take turns on each link: within slices or hosts, between them, to the host, and from it.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping

from paxlite.aot.collectives import Collective, collective
from paxlite.aot.costs import Costs, DeviceKernel, host_copy
from paxlite.aot.hlo import Computation, Instruction

# what a step waits for: kernels by what takes longer, and transfers while no kernel runs
COMPUTE, MEMORY, EXPOSED, HOST = PARTS = (
  'matrix multiplications', 'memory traffic', 'collectives', 'copies from and to the host',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Speed:
  """Operations per second of a device by operand type; '' stands for unlisted types."""

  flops: Mapping[str, float]  # FLOP/s by the type of the operands
  memory: float  # bytes/s of main memory
  links: Callable[[Collective], tuple[float, float]]  # seconds within slices or hosts, and between
  host: float = 0.0  # bytes/s to the host, and from it; 0 where it is not known
  # FLOP/s of which kernels of attention reach a share; empty: those of `flops`
  peak: Mapping[str, float] = dataclasses.field(default_factory=dict)
  launch: float = 0.0  # seconds that a kernel takes beside its work

  def compute(self, kernel: DeviceKernel) -> float:
    """Returns seconds for the FLOPs of a kernel."""
    if self.peak and kernel.peak_share is not None:
      return seconds_of(kernel.flops, self.peak) / kernel.peak_share
    return seconds_of(kernel.flops, self.flops)

  def kernel(self, kernel: DeviceKernel) -> float:
    """Returns seconds of one run of a kernel."""
    return max(self.compute(kernel), kernel.bytes / self.memory) + self.launch


def seconds_of(flops: Mapping[str, float], speeds: Mapping[str, float]) -> float:
  """Returns seconds for FLOPs by type, at speeds by type; '' is a type that is not listed."""
  return sum(n / speeds.get(dtype, speeds['']) for dtype, n in flops.items())


class Timeline:
  """Seconds of a program, or of a part of it.

  Attributes:
    parts: By what they wait for, one of PARTS.
    exposed: Those that nothing hides, by the name of the instruction that starts a transfer, or by
      'channel N' where it starts in a fusion.
  """

  def __init__(self) -> None:
    self.parts = dict.fromkeys(PARTS, 0.0)
    self.exposed = collections.defaultdict[str, float](float)

  @property
  def seconds(self) -> float:
    return sum(self.parts.values())

  def add(self, other: 'Timeline', times: int = 1) -> None:
    for part, seconds in other.parts.items():
      self.parts[part] += times * seconds
    for name, seconds in other.exposed.items():
      self.exposed[name] += times * seconds


class StepSchedule:
  """The schedule of a program."""

  def __init__(self, costs: Costs, speed: Speed, mesh_sizes: Mapping[str, int]):
    """Plays nothing yet.

    Args:
      costs: The costs of the program.
      speed: The speeds of the device.
      mesh_sizes: Sizes by axis of the mesh that the program was compiled for.
    """
    self._costs = costs
    self._speed = speed
    self._mesh_sizes = mesh_sizes
    # channels of collectives that one fusion starts and another ends
    self._begun = {
      channel
      for computation in costs.program.computations.values()
      if _calls(computation, 'AsyncCollectiveStart')
      for i in computation
      if (channel := i.attribute('channel_id'))
    }

  def timeline(self, computation: Computation) -> Timeline:
    """Returns the timeline of one run of a computation."""
    speed, line = self._speed, Timeline()
    clock = 0.0
    free = collections.defaultdict[str, float](float)  # when each link is free
    ends: dict[str, tuple[float, str]] = {}  # of transfers that are under way, and their part

    def start(name: str, part: str, used: Mapping[str, float]) -> None:
      links = [link for link, seconds in used.items() if seconds > 0]
      end = max([clock, *(free[link] for link in links)]) + sum(used.values())
      free.update(dict.fromkeys(links, end))
      ends[name] = end, part

    def wait(name: str) -> None:
      nonlocal clock
      end, part = ends.pop(name)
      if end > clock:
        line.parts[part] += end - clock
        line.exposed[name] += end - clock
        clock = end

    for instruction in computation:
      if called := self._costs.called(instruction):
        trips = self._costs.program.trips(computation, instruction)
        for inner in map(self.timeline, called):
          line.add(inner, trips)
          clock += inner.seconds * trips
        continue
      if (waited_for := self._end_of(computation, instruction)) in ends:
        wait(waited_for)
        continue
      if speed.host and (copy := host_copy(instruction)):
        start(instruction.name, HOST, {f'host {copy[1]}': copy[0] / speed.host})
        continue
      kernel = self._costs.kernel(computation, instruction)
      if kernel and collective(computation, instruction, self._mesh_sizes) is None:
        is_compute = speed.compute(kernel) >= kernel.bytes / speed.memory
        line.parts[COMPUTE if is_compute else MEMORY] += speed.kernel(kernel)
        clock += speed.kernel(kernel)
      for name, one, is_async in self._started(computation, instruction):
        if name not in ends:
          start(name, EXPOSED, dict(zip(('near', 'far'), speed.links(one), strict=True)))
          if not is_async:
            wait(name)
    for name in sorted(ends, key=ends.__getitem__):
      wait(name)
    return line

  def _started(
    self, computation: Computation, instruction: Instruction
  ) -> Iterator[tuple[str, Collective, bool]]:
    """Yields (its name, collective, whether others run) of what an instruction starts."""
    if one := collective(computation, instruction, self._mesh_sizes):
      starts = instruction.opcode.endswith('-start') or instruction.opcode == 'send'
      yield instruction.name, one, starts
    if instruction.opcode == 'custom-call-update':
      found = self._offloaded(computation, instruction)
      if found is not None:
        yield found.instruction, found, True
    # a TPU starts a collective in one fusion, and fusions that run meanwhile repeat it
    for inner in self._inside(instruction):
      starts = _calls(inner, 'AsyncCollectiveStart')
      for i in inner:
        channel = i.attribute('channel_id')
        one = collective(inner, i, self._mesh_sizes)
        if one and (starts or channel not in self._begun):
          yield f'channel {channel}', one, starts

  def _offloaded(self, computation: Computation, instruction: Instruction) -> Collective | None:
    """Returns the collective that a call of a TPU's SparseCores runs; None for other calls."""
    inner = self._costs.program.offloaded(computation, instruction)
    if inner is None:
      return None
    return next((one for i in inner if (one := collective(inner, i, self._mesh_sizes))), None)

  def _end_of(self, computation: Computation, instruction: Instruction) -> str:
    """Returns the name of the transfer that an instruction waits for; '' if it waits for none."""
    if instruction.opcode == 'custom-call-done':
      found = self._offloaded(computation, instruction)
      return '' if found is None else found.instruction
    if instruction.opcode.endswith('-done') and instruction.operands:
      return instruction.operands[0]
    ended = (c for c in self._inside(instruction) if _calls(c, 'AsyncCollectiveDone'))
    channels = (channel for c in ended for i in c if (channel := i.attribute('channel_id')))
    return next((f'channel {channel}' for channel in channels), '')

  def _inside(self, instruction: Instruction) -> Iterator[Computation]:
    """Yields the computations of a fusion, with those of fusions in it."""
    for inner in self._costs.program.called(instruction) if instruction.opcode == 'fusion' else ():
      yield inner
      for i in inner:
        yield from self._inside(i)


def _calls(computation: Computation, target: str) -> bool:
  return any(i.quoted('custom_call_target') == target for i in computation)
