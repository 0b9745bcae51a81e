"""The schedule of a compiled program, played at the speeds of a chip.

Instructions run in the order of the text. A kernel takes the longer of its FLOPs and its memory
traffic, at the rates that such kernels reach. A collective takes its bytes at the bandwidth of its
links, and what it reads and writes on the device takes no time of its own. The time between its
start and its end that no kernel fills is exposed. Collectives that are under way at the same time
take turns on the links within slices or hosts, and on those between them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from paxlite.aot.collectives import Collective, collective
from paxlite.aot.costs import Costs, DeviceKernel, host_copy
from paxlite.aot.hlo import Computation, Instruction


@dataclasses.dataclass(frozen=True)
class Speed:
  """What the device does in a second; '' is a type of operands that is not listed."""

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


@dataclasses.dataclass
class Timeline:
  """Seconds of a program, or of a part of it.

  `exposed_by` is by the name of the instruction that starts a collective, or by 'channel N' where
  it starts in a fusion.
  """

  compute_bound: float = 0.0  # kernels whose FLOPs take longer than their memory traffic
  memory_bound: float = 0.0  # other kernels
  exposed: float = 0.0  # only collectives run
  exposed_host: float = 0.0  # only copies from or to the host run
  collectives: float = 0.0  # all of them, hidden or exposed
  exposed_by: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def seconds(self) -> float:
    return self.compute_bound + self.memory_bound + self.exposed + self.exposed_host

  def add(self, other: 'Timeline', times: int = 1) -> None:
    names = 'compute_bound', 'memory_bound', 'exposed', 'exposed_host', 'collectives'
    for name in names:
      setattr(self, name, getattr(self, name) + times * getattr(other, name))
    for key, seconds in other.exposed_by.items():
      self.exposed_by[key] = self.exposed_by.get(key, 0.0) + times * seconds

  def wait(self, key: str, seconds: float) -> None:
    """Adds the seconds, if any, in which nothing but one collective runs."""
    if seconds > 0:
      self.exposed += seconds
      self.exposed_by[key] = self.exposed_by.get(key, 0.0) + seconds


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
    self._begun = self._channels_begun()

  def timeline(self, computation: Computation) -> Timeline:
    """Returns the timeline of one run of a computation."""
    speed = self._speed
    line = Timeline()
    clock = 0.0
    links_free = [0.0, 0.0]  # when the links within and between slices or hosts are free
    ends: dict[str, float] = {}  # of collectives that are under way, by instruction or channel
    copied: dict[str, float] = {}  # ends of copies that are under way, by instruction
    host_free = {True: 0.0, False: 0.0}  # when the way to the host, and that from it, is free
    for instruction in computation:
      if instruction.opcode in ('while', 'call', 'conditional', 'async-start'):
        is_branch = instruction.opcode == 'conditional'
        called = (
          self._costs.usual_branch(instruction)
          if is_branch
          else self._costs.program.called(instruction)
        )
        for inner in (self.timeline(c) for c in called):
          trips = self._costs.trips(computation, instruction)
          line.add(inner, trips)
          clock += inner.seconds * trips
        continue
      waited_for = self._end_of(instruction)
      if waited_for in ends:
        end = ends.pop(waited_for)
        line.wait(waited_for, end - clock)
        clock = max(clock, end)
        continue
      if waited_for in copied:
        end = copied.pop(waited_for)
        line.exposed_host += max(end - clock, 0.0)
        clock = max(clock, end)
        continue
      if speed.host and (copy := host_copy(instruction)):
        moved, to_host = copy
        copied[instruction.name] = host_free[to_host] = (
          max(clock, host_free[to_host]) + moved / speed.host
        )
        continue
      kernel = self._costs.kernel(computation, instruction)
      if kernel and collective(computation, instruction, self._mesh_sizes) is None:
        seconds = speed.kernel(kernel)
        if speed.compute(kernel) >= kernel.bytes / speed.memory:
          line.compute_bound += seconds
        else:
          line.memory_bound += seconds
        clock += seconds
      for key, one, is_async in self._started(computation, instruction):
        if key in ends:
          continue
        used = speed.links(one)
        line.collectives += sum(used)
        waits = [free for free, s in zip(links_free, used, strict=True) if s > 0]
        end = max([clock, *waits]) + sum(used)
        links_free = [end if s > 0 else free for free, s in zip(links_free, used, strict=True)]
        if is_async:
          ends[key] = end
        else:
          line.wait(key, end - clock)
          clock = end
    for key, end in sorted(ends.items(), key=lambda item: item[1]):
      line.wait(key, end - clock)
      clock = max(clock, end)
    return line

  def _started(
    self, computation: Computation, instruction: Instruction
  ) -> Iterator[tuple[str, Collective, bool]]:
    """Yields (key of the end, collective, whether others run) of what an instruction starts."""
    if one := collective(computation, instruction, self._mesh_sizes):
      starts = instruction.opcode.endswith('-start') or instruction.opcode == 'send'
      yield instruction.name, one, starts
    if instruction.opcode != 'fusion':
      return
    # a TPU starts a collective in one fusion, and fusions that run meanwhile repeat it
    for inner in self._inside(instruction):
      starts = _calls(inner, 'AsyncCollectiveStart')
      for i in inner:
        channel = i.attribute('channel_id')
        one = collective(inner, i, self._mesh_sizes)
        if one and (starts or channel not in self._begun):
          yield f'channel {channel}', one, starts

  def _channels_begun(self) -> set[str | None]:
    """Returns the channels of collectives that one fusion starts and another ends."""
    return {
      i.attribute('channel_id')
      for computation in self._costs.program.computations.values()
      if _calls(computation, 'AsyncCollectiveStart')
      for i in computation
      if i.attribute('channel_id')
    }

  def _end_of(self, instruction: Instruction) -> str | None:
    """Returns the key of the collective that an instruction waits for."""
    if instruction.opcode.endswith('-done') and instruction.operands:
      return instruction.operands[0]
    if instruction.opcode == 'fusion':
      for inner in self._inside(instruction):
        if _calls(inner, 'AsyncCollectiveDone'):
          for i in inner:
            if channel := i.attribute('channel_id'):
              return f'channel {channel}'
    return None

  def _inside(self, fusion: Instruction) -> list[Computation]:
    """Returns the computations of a fusion, with those of fusions in it."""
    found = self._costs.program.called(fusion)
    for inner in found:
      found = found + [c for i in inner if i.opcode == 'fusion' for c in self._inside(i)]
    return found


def _calls(computation: Computation, target: str) -> bool:
  return any(i.quoted('custom_call_target') == target for i in computation)
