"""Costs of a compiled step by model block, and the resource that bounds it on a chip."""

import collections
import dataclasses
from collections.abc import Mapping

from paxlite.aot import collectives
from paxlite.aot.chips import Chip
from paxlite.aot.collectives import Collective, collective
from paxlite.aot.costs import Costs, Platform, host_traffic
from paxlite.aot.explanation_tables import COLLECTIVES, UNKNOWN, label
from paxlite.aot.hlo import Computation, Instruction, Program
from paxlite.aot.origins import RECOMPUTED, Paths
from paxlite.aot.schedule import Speed, StepSchedule, Timeline, seconds_of
from paxlite.core.json_text import JsonObject

_CONTAINERS = 'while', 'call', 'conditional'  # they take as long as what they run, which counts


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
class Roofline:
  """Seconds of a step."""

  # those of each resource by itself, by the data sheet of the chip: compute (FLOPs, recomputation
  # and padding included), memory, ici (links within slices or hosts), dcn (between them), and host
  # (in the busier direction)
  resources: dict[str, float]
  # those of the schedule, one after the other, by what they wait for (schedule.PARTS), at the rates
  # that kernels reach where these were measured
  parts: dict[str, float]

  @property
  def step(self) -> float:
    """Seconds of the schedule."""
    return sum(self.parts.values())

  @property
  def least(self) -> float:
    """Seconds of a program that used all resources at the same time."""
    return max(self.resources.values())

  @property
  def bound(self) -> str:
    """The resource that bounds most of the step."""
    return max(self.parts, key=lambda name: self.parts[name])


@dataclasses.dataclass(frozen=True)
class ProgramCosts:
  """The costs of one run of a program on one device; seconds only for known chips."""

  flops: dict[str, float]  # of matrix multiplications, by the type of their operands
  traffic: int  # bytes that are read from and written to main memory
  kernels: int  # that run
  blocks: dict[str, JsonObject]  # see StepProgram.blocks
  communication: list[JsonObject]  # see StepProgram.communication
  roofline: Roofline | None
  host_traffic: tuple[int, int] = (0, 0)  # bytes that are read from the host, and written to it


class StepProgram:
  """A compiled program on a mesh, at the speeds of a chip.

  Raises ValueError if the text is no program.

  Args:
    text: Optimized HLO, from `compiled.as_text()`.
    platform: The kind of device that it was compiled for.
    links: The mesh that it was compiled for.
    chip: The chip, if it is known.
  """

  def __init__(self, text: str, platform: Platform, links: Links, chip: Chip | None):
    self.costs, self.links, self.chip = Costs(Program(text), platform), links, chip
    self._paths = Paths(self.costs.program)
    self._speed = None if chip is None else _speed_of(chip, links)

  def summary(self) -> ProgramCosts:
    """Returns the costs of the program."""
    costs, speed, chip = self.costs, self._speed, self.chip
    flops, traffic, host = costs.flops(), costs.traffic(), host_traffic(costs)
    line = None
    if speed is not None:
      line = StepSchedule(costs, speed, self.links.sizes).timeline(costs.program.entry)
    found, roofline = self.communication(line), None
    if chip is not None and line is not None:
      sent = lambda name: sum(row[name] for row in found)
      resources = {
        'compute': seconds_of(flops, chip.flops_by_type),
        'memory': traffic / chip.memory_bandwidth,
        'ici': sent('ici_bytes') / chip.ici_bandwidth,
        'dcn': sent('dcn_bytes') / chip.dcn_bandwidth,
        'host': max(host) / chip.host_bandwidth if chip.host_bandwidth else 0.0,
      }
      roofline = Roofline(resources, line.parts)
    count = sum(n for _, n in costs.kernels())
    return ProgramCosts(flops, traffic, count, self.blocks(), found, roofline, host)

  def communication(self, line: Timeline | None) -> list[JsonObject]:
    """Returns the collectives by block, pass, kind and axes, the most sent first, for JSON.

    `bytes` are those of the arrays, of all `runs` together. A device sends `ici_bytes` within its
    slice or host and `dcn_bytes` to others. At the speeds of the chip they take `seconds`, of which
    no kernel hides `exposed`; without a timeline, both are None.
    """
    found = dict[tuple[object, ...], JsonObject]()
    exposed = {} if line is None else dict(line.exposed)
    for one in collectives.collectives(self.costs.program, self.links.sizes):
      computation = self.costs.program.computations[one.computation]
      parts = self._paths.origins(computation, computation.get(one.instruction))
      about = {
        'block': label([p.block for p in parts]), 'pass': label([p.of for p in parts]),
        'kind': one.kind, 'axes': one.axes,
      }  # fmt: skip
      near, far = self.links.split(one.axes, one.sent_bytes)
      sums: dict[str, float] = dict(
        runs=one.count, bytes=one.bytes * one.count, ici_bytes=near, dcn_bytes=far
      )
      if self._speed is not None:
        sums['seconds'] = sum(self._speed.links(one))
        # copies of an instruction share a channel, and the time spent waiting for it counts once
        names = one.instruction, f'channel {one.channel}'
        sums['exposed'] = sum(exposed.pop(name, 0.0) for name in names)
      unknown = {'seconds': None, 'exposed': None}
      row = found.setdefault(tuple(about.values()), about | unknown | dict.fromkeys(sums, 0))
      row |= {name: row[name] + n for name, n in sums.items()}
    return sorted(found.values(), key=lambda row: -(row['ici_bytes'] + row['dcn_bytes']))

  def blocks(self, measured: Mapping[str, float] | None = None) -> dict[str, JsonObject]:
    """Returns the blocks of the model by their names, for JSON.

    Each has `flops`, of which `recomputed` are those of the forward pass that the backward pass
    computes again, the `bytes` that its kernels read from and write to main memory, and seconds of
    its kernels one after the other: `predicted` at the speeds of the chip, None where these are not
    known and for collectives, which kernels may hide; and `measured` in a trace, None without one.

    A kernel of several blocks is one of 'several', or of 'layer (several)'. Collectives are a block
    of their own.

    Args:
      measured: Seconds in a step by the name of the instruction, as traces.seconds returns them.
    """
    nothing: JsonObject = {'flops': 0.0, 'recomputed': 0.0, 'bytes': 0, 'predicted': None}
    nothing['measured'] = None if measured is None else 0.0
    found = collections.defaultdict[str, JsonObject](nothing.copy)
    for kernel, count in self.costs.kernels():
      name = self._block(kernel.computation, kernel.instruction)
      block, flops = found[name], count * sum(kernel.flops.values())
      block['flops'] += flops
      origins = self._paths.origins(kernel.computation, kernel.instruction)
      block['recomputed'] += flops if origins[0].of == RECOMPUTED else 0.0
      if name != COLLECTIVES:
        block['bytes'] += count * kernel.bytes
        if self._speed is not None:
          block['predicted'] = (block['predicted'] or 0.0) + count * self._speed.kernel(kernel)
    places = {i.name: (c, i) for c in self.costs.program.computations.values() for i in c}
    for instruction, seconds in (measured or {}).items():
      place = places.get(instruction)
      if place is None or place[1].opcode not in _CONTAINERS:
        found[UNKNOWN if place is None else self._block(*place)]['measured'] += seconds
    return dict(found)

  def _block(self, computation: Computation, instruction: Instruction) -> str:
    """Returns the name of the block of an instruction."""
    if collective(computation, instruction, self.links.sizes) is not None:
      return COLLECTIVES
    return label([o.block for o in self._paths.origins(computation, instruction)])


def _speed_of(chip: Chip, links: Links) -> Speed:
  """Returns the speeds of a chip in a mesh: what its kernels reach, and its links."""

  def seconds(one: Collective) -> tuple[float, float]:
    near, far = links.split(one.axes, one.sent_bytes)
    return near / chip.ici_bandwidth, far / chip.dcn_bandwidth

  return Speed(
    chip.reached_flops, chip.reached_bandwidth, seconds, chip.host_bandwidth,
    peak=chip.sheet_flops if chip.rates.source else {}, launch=chip.rates.launch,
  )  # fmt: skip
