"""FLOPs, memory traffic and time of a training step by blocks of the model, predicted and measured.

Each kernel of the compiled program belongs to one block, by the path that JAX has noted for it. The
names are those of origins.py, which explanations have, too. A trace of the profiler says how long
each instruction took; the program says which block it is of.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from paxlite.aot.collectives import collective
from paxlite.aot.costs import Costs
from paxlite.aot.explanation_tables import COLLECTIVES, UNKNOWN, label
from paxlite.aot.hlo import Computation, Instruction
from paxlite.aot.origins import Paths
from paxlite.aot.schedule import Speed

_CONTAINERS = 'while', 'call', 'conditional'  # they take as long as what they run, which counts


@dataclasses.dataclass(frozen=True)
class Block:
  """A part of a step on one device; its seconds are those of kernels one after the other.

  They are predicted at the speeds of the chip; None where these are not known, and for collectives,
  which kernels may hide. They are measured in a trace, if there is one.
  """

  flops: float = 0.0
  bytes: int = 0  # that its kernels read from and write to main memory
  predicted: float | None = None
  measured: float | None = None


def blocks_of(
  costs: Costs,
  mesh_sizes: Mapping[str, int],
  speed: Speed | None = None,
  measured: Mapping[str, float] | None = None,
) -> dict[str, Block]:
  """Returns the blocks of a step by their names.

  A kernel of several blocks is one of 'several', or of 'layer (several)'. Collectives are a block
  of their own.

  Args:
    costs: The costs of the program of a step.
    mesh_sizes: Devices by axis of its mesh.
    speed: The speeds of the device.
    measured: Seconds in a step by the name of the instruction, as `traced_seconds` returns them.
  """
  paths = Paths(costs.program)

  def name_of(computation: Computation, instruction: Instruction) -> str:
    if collective(computation, instruction, mesh_sizes) is not None:
      return COLLECTIVES
    return label([origin.block for origin in paths.origins(computation, instruction)])

  flops, predicted, took = (collections.defaultdict[str, float](float) for _ in range(3))
  moved: dict[str, int] = collections.defaultdict(int)
  for kernel, count in costs.kernels():
    name = name_of(kernel.computation, kernel.instruction)
    moved[name] += 0 if name == COLLECTIVES else count * kernel.bytes
    flops[name] += count * sum(kernel.flops.values())
    predicted[name] += 0.0 if speed is None else count * speed.kernel(kernel)
  places = {i.name: (c, i) for c in costs.program.computations.values() for i in c}
  for instruction, seconds in (measured or {}).items():
    place = places.get(instruction)
    if place is None or place[1].opcode not in _CONTAINERS:
      took[UNKNOWN if place is None else name_of(*place)] += seconds
  return {
    name: Block(
      flops[name],
      moved[name],
      None if speed is None or name in (COLLECTIVES, UNKNOWN) else predicted[name],
      None if measured is None else took[name],
    )
    for name in {**moved, **took}
  }


def traced_seconds(folder: pathlib.Path, module: str, runs: int) -> dict[str, float]:
  """Returns the seconds of each instruction of a program in one run on one device, by its name.

  Traces of CPUs and GPUs name the instruction of each event, and those of TPUs the program of none.

  Args:
    folder: The folder of traces, which has plugins/profile/…; the newest one is read.
    module: The name of the program, such as jit_step.
    runs: How often each device has run it while it was traced.
  """
  from jax.profiler import ProfileData

  found: dict[str, float] = collections.defaultdict(float)
  devices = set()
  for path in sorted(folder.rglob('*.xplane.pb'))[-1:]:
    for device, name, seconds in _events(ProfileData.from_file(str(path)), module):
      devices.add(device)
      found[name] += seconds
  return {name: seconds / runs / len(devices) for name, seconds in found.items()}


def _events(profile: Any, module: str) -> Iterator[tuple[str, str, float]]:
  """Yields (device, instruction, seconds) of each run of an instruction."""
  for plane in profile.planes:
    of_device = plane.name.startswith('/device:')
    for line in plane.lines:
      if of_device and not line.name.startswith('Stream'):
        continue  # what is derived from the streams
      for event in line.events:
        stats = dict(event.stats)
        if stats.get('hlo_module') == module and 'hlo_op' in stats:
          device = plane.name if of_device else str(stats.get('device_ordinal', 0))
          yield device, str(stats['hlo_op']), event.duration_ns / 1e9
