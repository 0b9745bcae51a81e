"""What bounds a compiled step: its costs, read from its program, at the speeds of a chip."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paxlite.aot import collectives
from paxlite.aot.chips import Chip
from paxlite.aot.collectives import Collective, collective
from paxlite.aot.costs import Costs, Platform, host_traffic
from paxlite.aot.hlo import Computation, Instruction, Program
from paxlite.aot.origins import UPDATE, Paths
from paxlite.aot.schedule import Speed, StepSchedule, Timeline, seconds_of

PRODUCTS, ATTENTION, TRAFFIC, OPTIMIZER = PARTS = 'products', 'attention', 'traffic', 'optimizer'


@dataclasses.dataclass(frozen=True)
class Links:
  """The devices by mesh axis of a program, and how many of them are within one slice or host."""

  sizes: Mapping[str, int]
  near: Mapping[str, int]

  def split(self, axes: tuple[str, ...], sent: float) -> tuple[float, float]:
    """Returns the bytes within and between slices or hosts that one device sends along mesh axes.

    Collectives are hierarchical: data of other hosts crosses the network once per host, split over
    its devices, and then goes round within the host.
    """
    if axes == (collectives.BETWEEN_SLICES,):
      return 0.0, sent
    members, near = 1, 1
    for axis in axes:
      members *= self.sizes[axis]
      near *= self.near[axis]
    far = sent * (members - near) / (members - 1) / near if members > near else 0.0
    return (sent if near > 1 else 0.0), far


@dataclasses.dataclass(frozen=True)
class Communication:
  """All collectives of one kind along the same mesh axes, in one step of one device."""

  kind: str
  axes: tuple[str, ...]
  runs: int
  bytes: int  # of the arrays, of all runs together
  ici_bytes: float  # sent within a slice or host
  dcn_bytes: float  # sent to other slices or hosts


def communication(found: Sequence[Collective], links: Links) -> list[Communication]:
  """Returns collectives by kind and axes, the most sent first."""
  groups = collections.defaultdict(list)
  for c in found:
    groups[c.kind, c.axes].append(c)
  sent = {key: sum(c.sent_bytes for c in group) for key, group in groups.items()}
  return [
    Communication(
      *key, sum(c.count for c in groups[key]), sum(c.bytes * c.count for c in groups[key]),
      *links.split(key[1], sent[key]),
    )
    for key in sorted(groups, key=lambda key: -sent[key])
  ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of a step.

  compute, memory, ici, dcn and host are those of each resource by itself, by the data sheet of the
  chip. The others are the parts of the schedule, one after the other, at the rates that kernels
  reach where these were measured.
  """

  compute: float  # FLOPs, recomputation and padding included
  memory: float  # traffic to and from main memory
  ici: float  # bytes sent within slices or hosts
  dcn: float  # bytes sent between slices or hosts
  compute_bound: float  # kernels whose FLOPs take longer than their traffic
  memory_bound: float  # other kernels
  exposed: float  # only collectives run
  host: float = 0.0  # copies between the device and its host, in the busier direction
  exposed_host: float = 0.0  # only such copies run

  @property
  def step(self) -> float:
    """Seconds of the schedule."""
    return self.compute_bound + self.memory_bound + self.exposed + self.exposed_host

  @property
  def least(self) -> float:
    """Seconds of a program that used all resources at the same time."""
    return max(self.compute, self.memory, self.ici, self.dcn, self.host)

  @property
  def parts(self) -> dict[str, float]:
    """The seconds of the schedule by what they wait for."""
    return {
      'matrix multiplications': self.compute_bound,
      'memory traffic': self.memory_bound,
      'collectives': self.exposed,
      'copies from and to the host': self.exposed_host,
    }

  @property
  def bound(self) -> str:
    """What most of the step waits for."""
    return max(self.parts, key=lambda name: self.parts[name])


@dataclasses.dataclass(frozen=True)
class ProgramCosts:
  """What one run of a program does on one device; seconds are known where the chip is."""

  flops: dict[str, float]  # of matrix multiplications, by the type of their operands
  traffic: int  # bytes that are read from and written to main memory
  traffic_by_part: dict[str, int]  # the same by the part of the model, most first
  kernels: int  # that run
  communication: tuple[Communication, ...]
  roofline: Roofline | None
  host_traffic: tuple[int, int] = (0, 0)  # bytes that are read from the host, and written to it
  kernel_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by PARTS


def speed_of(chip: Chip, links: Links) -> Speed:
  """Returns the speeds of a chip in a mesh: what its kernels reach, and its links."""

  def seconds(one: Collective) -> tuple[float, float]:
    near, far = links.split(one.axes, one.sent_bytes)
    return near / chip.ici_bandwidth, far / chip.dcn_bandwidth

  return Speed(
    chip.reached_flops, chip.reached_bandwidth, seconds, chip.host_bandwidth,
    peak=chip.sheet_flops if chip.rates.source else {}, launch=chip.rates.launch,
  )  # fmt: skip


class StepProgram:
  """A compiled program on a mesh, at the speeds of a chip.

  Args:
    text: Optimized HLO, from `compiled.as_text()` or a file that XLA has dumped.
    platform: The kind of device that it was compiled for.
    links: The mesh that it was compiled for.
    chip: The chip, if it is known.

  Raises:
    ValueError: The text is no program.
  """

  def __init__(self, text: str, platform: Platform, links: Links, chip: Chip | None):
    self.costs, self.links, self.chip = Costs(Program(text), platform), links, chip
    self.paths = Paths(self.costs.program)
    self.speed = None if chip is None else speed_of(chip, links)

  def timeline(self, speed: Speed) -> Timeline:
    """Returns the timeline of one run."""
    schedule = StepSchedule(self.costs, speed, self.links.sizes)
    return schedule.timeline(self.costs.program.entry)

  def is_collective(self, computation: Computation, instruction: Instruction) -> bool:
    """Returns whether an instruction is or starts a collective."""
    return collective(computation, instruction, self.links.sizes) is not None


def costs_of(step: StepProgram) -> ProgramCosts:
  """Returns the costs of a program."""
  costs, chip = step.costs, step.chip
  found = communication(collectives.collectives(costs.program, step.links.sizes), step.links)
  flops, traffic, host = costs.flops(), costs.traffic(), host_traffic(costs)
  roofline, of_kernels = None, dict[str, float]()
  if chip is not None and step.speed is not None:
    line = step.timeline(step.speed)
    of_kernels = kernel_seconds(step, step.speed)
    roofline = Roofline(
      compute=seconds_of(flops, chip.flops_by_type),
      memory=traffic / chip.memory_bandwidth,
      ici=sum(c.ici_bytes for c in found) / chip.ici_bandwidth,
      dcn=sum(c.dcn_bytes for c in found) / chip.dcn_bandwidth,
      compute_bound=line.compute_bound,
      memory_bound=line.memory_bound,
      exposed=line.exposed,
      host=max(host) / chip.host_bandwidth if chip.host_bandwidth else 0.0,
      exposed_host=line.exposed_host,
    )
  count = sum(n for _, n in costs.kernels())
  by_source = costs.traffic_by_source()
  return ProgramCosts(flops, traffic, by_source, count, tuple(found), roofline, host, of_kernels)


def kernel_seconds(step: StepProgram, speed: Speed) -> dict[str, float]:
  """Returns the seconds of the kernels of a step by their part, one of PARTS.

  Together they are the kernels of the timeline. Attention that is no kernel of its own is in the
  products and in the traffic. A kernel of the optimizer comes from the update of the weights alone,
  and has no product: a compiler may fuse the update with that of a gradient.
  """
  # another program, such as one that writes text, has no update of weights
  is_training = any('jvp(' in kernel.instruction.source for kernel, _ in step.costs.kernels())
  found: dict[str, float] = collections.defaultdict(float)
  for kernel, count in step.costs.kernels():
    if step.is_collective(kernel.computation, kernel.instruction):
      continue  # what it reads and writes takes no time of its own
    origins = step.paths.origins(kernel.computation, kernel.instruction)
    part = PRODUCTS if kernel.flops else TRAFFIC
    if kernel.peak_share is not None:
      part = ATTENTION
    elif not kernel.flops and is_training and all(o.of == UPDATE for o in origins):
      part = OPTIMIZER
    found[part] += count * speed.kernel(kernel)
  return {name: found[name] for name in PARTS if name in found}


def lines(costs: ProgramCosts, chip: Chip | None, parts: int = 8) -> Iterator[str]:
  """Yields the costs as lines of text, with the parts of the model that move most."""
  flops = ', '.join(f'{n:.4g} {dtype}' for dtype, n in costs.flops.items()) or 'none'
  yield 'What the program does in a step, on one device'
  yield f'  FLOPs           {flops}, of matrix multiplications'
  yield f'  memory traffic  {costs.traffic / 1e9:,.2f} GB by {costs.kernels:,} kernels:'
  shown = list(costs.traffic_by_part.items())[:parts]
  for name, moved in shown:
    yield f'    {moved / 1e9:10,.2f} GB  {name}'
  if (rest := costs.traffic - sum(moved for _, moved in shown)) > 0:
    yield f'    {rest / 1e9:10,.2f} GB  in {len(costs.traffic_by_part) - parts} other parts'
  if any(costs.host_traffic):
    read, written = (moved / 1e9 for moved in costs.host_traffic)
    yield f'  host            {read:,.2f} GB are read, {written:,.2f} GB written'
  if costs.communication:
    yield from ('', 'Collectives of a step')
    yield f'  {"kind":20} {"axes":16} {"runs":>5}    array bytes   sent within    sent between'
    for c in costs.communication:
      yield (
        f'  {c.kind:20} {"+".join(c.axes):16} {c.runs:5,} {c.bytes:14,} {c.ici_bytes:13,.0f} '
        f'{c.dcn_bytes:15,.0f}'
      )
    yield '  within and between slices or hosts, by one device, in rings'
  if (t := costs.roofline) is None or chip is None:
    return
  peaks = chip.flops_by_type
  used = {peaks.get(dtype, peaks['']) for dtype in costs.flops} or {chip.peak_flops}
  at = ' and '.join(f'{peak / 1e12:,.0f}' for peak in sorted(used))
  yield from ('', f'Seconds of each resource in a step, by {chip.source}, and of the whole step')
  yield f'  compute  {t.compute:9.4f}   at {at} TFLOP/s'
  yield f'  memory   {t.memory:9.4f}   at {chip.memory_bandwidth / 1e9:,.0f} GB/s'
  yield f'  within   {t.ici:9.4f}   at {chip.ici_bandwidth / 1e9:,.0f} GB/s a device and axis'
  yield f'  between  {t.dcn:9.4f}   at {chip.dcn_bandwidth / 1e9:,.1f} GB/s a device'
  if t.host:
    yield (
      f'  host     {t.host:9.4f}   at {chip.host_bandwidth / 1e9:,.0f} GB/s each way, of which '
      f'nothing hides {t.exposed_host:.4f}'
    )
  yield (
    f'  a step   {t.step:9.4f}   in the order of the schedule: {t.compute_bound:.4f} of matrix '
    'multiplications,'
  )
  yield (
    f'                       {t.memory_bound:.4f} of kernels that wait for memory, '
    f'{t.exposed:.4f} of collectives that nothing hides'
  )
  named = ', '.join(f'{part} {seconds:.4f}' for part, seconds in costs.kernel_seconds.items())
  yield f'  Its kernels by their parts: {named}'
  yield f'  Most of the step is {t.bound}.'
  if (rates := chip.rates).source:
    share = chip.reached_flops[''] / peaks['']  # more of what was measured
    yield (
      f'  A step assumes {share:.0%} of the FLOP/s, {rates.memory:.0%} of the bandwidth and '
      f'{rates.launch * 1e6:g} µs a kernel,'
    )
    yield f'  as measured on {rates.source}; links are those of the data sheet.'
