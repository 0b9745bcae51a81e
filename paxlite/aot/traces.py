"""The time of each instruction of a program, from a trace of JAX's profiler."""

import collections
import pathlib
from collections.abc import Iterator
from typing import Any


def seconds(folder: pathlib.Path, module: str, runs: int) -> dict[str, float]:
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
    for device, name, spent in _events(ProfileData.from_file(str(path)), module):
      devices.add(device)
      found[name] += spent
  return {name: spent / runs / len(devices) for name, spent in found.items()}


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
