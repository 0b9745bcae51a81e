"""FLOPs, memory traffic and time of a training step by blocks of the model, predicted and measured.

Each kernel of the compiled program belongs to one block, by the path that JAX has noted for it. The
names are those of origins.py, which explanations have, too. A trace of the profiler says how long
each instruction took; the program says which block it is of.
"""

import collections
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from paxlite.aot.explanation_tables import COLLECTIVES, UNKNOWN, label
from paxlite.aot.hlo import Computation, Instruction
from paxlite.aot.roofline import StepProgram
from paxlite.core.json_text import JsonObject

_CONTAINERS = 'while', 'call', 'conditional'  # they take as long as what they run, which counts


def blocks_of(
  step: StepProgram, measured: Mapping[str, float] | None = None
) -> dict[str, JsonObject]:
  """Returns the blocks of a step on one device by their names, for JSON.

  Each has `flops`, the `bytes` that its kernels read from and write to main memory, and seconds of
  its kernels one after the other: `predicted` at the speeds of the chip, None where these are not
  known and for collectives, which kernels may hide; and `measured` in a trace, None without one.

  A kernel of several blocks is one of 'several', or of 'layer (several)'. Collectives are a block
  of their own.

  Args:
    step: The program of the step.
    measured: Seconds in a step by the name of the instruction, as `traced_seconds` returns them.
  """
  costs, speed = step.costs, step.speed

  def name_of(computation: Computation, instruction: Instruction) -> str:
    if step.is_collective(computation, instruction):
      return COLLECTIVES
    return label([origin.block for origin in step.paths.origins(computation, instruction)])

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
  is_predicted = lambda name: speed is not None and name not in (COLLECTIVES, UNKNOWN)
  return {
    name: {
      'flops': flops[name], 'bytes': moved[name],
      'predicted': predicted[name] if is_predicted(name) else None,
      'measured': None if measured is None else took[name],
    }
    for name in {**moved, **took}
  }  # fmt: skip


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
