"""What bounds a compiled step: its costs, read from its program, at the speeds of a chip."""

import dataclasses
from collections.abc import Mapping

from paxlite.aot import collectives
from paxlite.aot.chips import Chip
from paxlite.aot.collectives import Collective
from paxlite.aot.costs import Costs, Platform
from paxlite.aot.hlo import Program
from paxlite.aot.host_copies import host_traffic
from paxlite.aot.schedule import Speed, StepSchedule, seconds_of
from paxlite.aot.step_parts import kernel_seconds


@dataclasses.dataclass(frozen=True)
class Links:
  """The mesh of a program, and which of its devices are near each other.

  Attributes:
    sizes: Devices by mesh axis.
    near: Of these, the devices within one slice or host.
  """

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
  """All collectives of one kind along the same mesh axes, in one step of one device.

  Attributes:
    kind: One of collectives.KINDS.
    axes: Mesh axes along which devices communicate.
    runs: Number of runs in a step.
    bytes: Bytes of the arrays, of all runs together.
    ici_bytes: Bytes sent within a slice or host.
    dcn_bytes: Bytes sent to other slices or hosts.
  """

  kind: str
  axes: tuple[str, ...]
  runs: int
  bytes: int
  ici_bytes: float
  dcn_bytes: float


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of a step.

  compute, memory, ici, dcn and host are those of each resource by itself, by the data sheet of the
  chip. The others are the parts of the schedule, one after the other, at the rates that kernels
  reach where these were measured.

  Attributes:
    compute: Seconds for the FLOPs of the program, recomputation and padding included.
    memory: Seconds for its traffic to and from main memory.
    ici: Seconds to send the bytes within slices or hosts.
    dcn: Seconds to send the bytes between slices or hosts.
    compute_bound: Seconds of kernels whose FLOPs take longer than their traffic.
    memory_bound: Seconds of the other kernels.
    exposed: Seconds in which only collectives run.
    host: Seconds for the copies between the device and its host, in the busier direction.
    exposed_host: Seconds in which only such copies run.
  """

  compute: float
  memory: float
  ici: float
  dcn: float
  compute_bound: float
  memory_bound: float
  exposed: float
  host: float = 0.0
  exposed_host: float = 0.0

  @property
  def step(self) -> float:
    """Seconds of the schedule."""
    return self.compute_bound + self.memory_bound + self.exposed + self.exposed_host

  @property
  def least(self) -> float:
    """Seconds of a program that used all resources at the same time."""
    return max(self.compute, self.memory, self.ici, self.dcn, self.host)

  @property
  def bound(self) -> str:
    """What most of the step waits for."""
    parts = {
      'matrix multiplications': self.compute_bound,
      'memory traffic': self.memory_bound,
      'collectives': self.exposed,
      'copies from and to the host': self.exposed_host,
    }
    return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class ProgramCosts:
  """What one run of a program does on one device.

  Attributes:
    flops: FLOPs of matrix multiplications by the type of their operands.
    traffic: Bytes that are read from and written to main memory.
    traffic_by_part: The same by the part of the model, most first.
    kernels: Number of kernels that run.
    communication: Collectives by kind and mesh axes.
    roofline: Seconds; None where the chip is not known.
    host_traffic: Bytes that are read from the host, and bytes that are written to it.
    kernel_seconds: Seconds of the kernels by their part, one of step_parts.PARTS; empty where the
      chip is not known.
  """

  flops: dict[str, float]
  traffic: int
  traffic_by_part: dict[str, int]
  kernels: int
  communication: tuple[Communication, ...]
  roofline: Roofline | None
  host_traffic: tuple[int, int] = (0, 0)
  kernel_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def speed_of(chip: Chip, links: Links) -> Speed:
  """Returns the speeds of a chip in a mesh: what its kernels reach, and its links.

  All are divided by the measured ratio of a run, if the chip has one.
  """
  slower = chip.slower
  each = lambda speeds: {dtype: flops / slower for dtype, flops in speeds.items()}

  def seconds(one: Collective) -> tuple[float, float]:
    near, far = links.split(one.axes, one.sent_bytes)
    return slower * near / chip.ici_bandwidth, slower * far / chip.dcn_bandwidth

  return Speed(
    each(chip.reached_flops), chip.reached_bandwidth / slower, seconds,
    chip.host_bandwidth / slower, peak=each(chip.sheet_flops) if chip.rates.source else {},
    launch=slower * chip.rates.launch,
  )  # fmt: skip


def costs_of(text: str, platform: Platform, links: Links, chip: Chip | None) -> ProgramCosts:
  """Reads the costs of a program.

  Args:
    text: Optimized HLO, from `compiled.as_text()` or a file that XLA has dumped.
    platform: The kind of device that it was compiled for.
    links: The mesh that it was compiled for.
    chip: The chip whose speeds are taken.

  Raises:
    ValueError: The text is no program.
  """
  program = Program(text)
  costs = Costs(program, platform)
  found = []
  for kind, axes, runs, total, sent in collectives.totals(
    collectives.collectives(program, links.sizes)
  ):
    found.append(Communication(kind, axes, runs, total, *links.split(axes, sent)))
  flops, traffic, host = costs.flops(), costs.traffic(), host_traffic(costs)
  roofline, of_kernels = None, dict[str, float]()
  if chip is not None:
    speed = speed_of(chip, links)
    line = StepSchedule(costs, speed, links.sizes).timeline(program.entry)
    of_kernels = kernel_seconds(costs, speed, links.sizes)
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


def lines(costs: ProgramCosts, chip: Chip | None, parts: int = 8) -> list[str]:
  """Returns the costs as lines of text, with the parts of the model that move most."""
  flops = ', '.join(f'{n:.4g} {dtype}' for dtype, n in costs.flops.items()) or 'none'
  found = [
    'What the program does in a step, on one device',
    f'  FLOPs           {flops}, of matrix multiplications',
    f'  memory traffic  {costs.traffic / 1e9:,.2f} GB by {costs.kernels:,} kernels:',
  ]
  shown = list(costs.traffic_by_part.items())[:parts]
  found += [f'    {moved / 1e9:10,.2f} GB  {name}' for name, moved in shown]
  rest = costs.traffic - sum(moved for _, moved in shown)
  if rest > 0:
    found.append(f'    {rest / 1e9:10,.2f} GB  in {len(costs.traffic_by_part) - parts} other parts')
  if any(costs.host_traffic):
    read, written = costs.host_traffic
    found.append(
      f'  host            {read / 1e9:,.2f} GB are read, {written / 1e9:,.2f} GB written'
    )
  if costs.communication:
    found += ['', 'Collectives of a step', '  kind                 axes              runs']
    found[-1] += '    array bytes   sent within    sent between'
    for c in costs.communication:
      found.append(
        f'  {c.kind:20} {"+".join(c.axes):16} {c.runs:5,} {c.bytes:14,} {c.ici_bytes:13,.0f} '
        f'{c.dcn_bytes:15,.0f}'
      )
    found.append('  within and between slices or hosts, by one device, in rings')
  if (t := costs.roofline) is not None and chip is not None:
    found += [
      '',
      f'Seconds of each resource in a step, by {chip.source}, and of the whole step',
      f'  compute  {t.compute:9.4f}   at {_peaks(costs, chip)} TFLOP/s',
      f'  memory   {t.memory:9.4f}   at {chip.memory_bandwidth / 1e9:,.0f} GB/s',
      f'  within   {t.ici:9.4f}   at {chip.ici_bandwidth / 1e9:,.0f} GB/s a device and axis',
      f'  between  {t.dcn:9.4f}   at {chip.dcn_bandwidth / 1e9:,.1f} GB/s a device',
      f'  a step   {t.step:9.4f}   in the order of the schedule: {t.compute_bound:.4f} of matrix '
      'multiplications,',
      f'                       {t.memory_bound:.4f} of kernels that wait for memory, '
      f'{t.exposed:.4f} of collectives that nothing hides',
      '  Its kernels by their parts: '
      + ', '.join(f'{part} {seconds:.4f}' for part, seconds in costs.kernel_seconds.items()),
      f'  Most of the step is {t.bound}.',
      *_rates(chip),
    ]
    if t.host:
      at = -5 - len(_rates(chip))
      found[at:at] = [
        f'  host     {t.host:9.4f}   at {chip.host_bandwidth / 1e9:,.0f} GB/s each way, '
        f'of which nothing hides {t.exposed_host:.4f}'
      ]
  return found


def _rates(chip: Chip) -> list[str]:
  """Says what a step assumes of kernels beside the data sheet."""
  measured = [] if chip.step is None else [f'  {chip.step.sentence()}']
  if not (rates := chip.rates).source:
    return measured
  share = chip.reached_flops[''] / chip.flops_by_type['']  # more of what was measured
  return [
    f'  A step assumes {share:.0%} of the FLOP/s, {rates.memory:.0%} of the bandwidth and '
    f'{rates.launch * 1e6:g} µs a kernel,',
    f'  as measured on {rates.source}; links are those of the data sheet.',
    *measured,
  ]


def _peaks(costs: ProgramCosts, chip: Chip) -> str:
  peaks = chip.flops_by_type
  used = {peaks.get(dtype, peaks['']) for dtype in costs.flops} or {chip.peak_flops}
  return ' and '.join(f'{peak / 1e12:,.0f}' for peak in sorted(used))
