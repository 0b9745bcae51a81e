"""Peak FLOP/s of known devices, and profiler traces of steps."""

import pathlib
import re

import jax

# Dense bf16 FLOP/s per device from the vendors' data sheets. The first name that occurs in the
# device's kind, as complete words, counts.
_PEAK_FLOPS = {
  'A100': 312e12,
  'H100 PCIe': 756e12,
  'H100 NVL': 835e12,
  'H100': 989e12,
  'H200': 989e12,
  'H800': 989e12,
  'B200': 2250e12,
  'L40S': 362e12,
  'L4': 121e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5p': 459e12,
  'TPU v5': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Returns the dense bf16 peak in FLOP/s of JAX's device_kind, or None if unknown (CPUs)."""
  for name, flops in _PEAK_FLOPS.items():
    if re.search(rf'\b{name}\b', device_kind, re.IGNORECASE):
      return flops
  return None


class StepProfiler:
  """Traces steps [first, first + count) into `folder`, for Perfetto and xprof.

  The caller must wait for the device before `switch`, so that the trace holds exactly these steps.
  Only process 0 writes a trace.

  Args:
    folder: The trace is written to folder/plugins/profile/….
    first: The first step to trace; None traces nothing.
    count: Number of steps to trace.
    last: The last step of the run, after which no trace starts.
  """

  def __init__(self, folder: pathlib.Path, first: int | None, count: int, last: int):
    self._folder = folder
    self._first = first if jax.process_index() == 0 and first != last else None
    self._count = count
    self._running = False

  def is_due(self, step: int) -> bool:
    """Returns whether the trace starts or stops when `step` steps are done."""
    if self._first is None:
      return False
    return step >= self._first + self._count if self._running else step == self._first

  def switch(self) -> None:
    """Starts or stops the trace."""
    if self._running:
      self.stop()
      return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Its hook in all calls slows a run and can crash it.
    jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
    self._running = True

  def stop(self) -> None:
    """Stops the trace, if one is running."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
