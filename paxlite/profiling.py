"""Peaks of known devices, traces, and memory."""

import pathlib

import jax

# Dense bf16 FLOP/s per device, from the vendors' data sheets.
_PEAK_FLOPS = {
  'A100': 312e12,
  'H100 PCIe': 756e12,
  'H100': 989e12,
  'H200': 989e12,
  'H800': 989e12,
  'B200': 2250e12,
  'L4': 121e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5p': 459e12,
  'TPU v5': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
}


def peak_flops(device: jax.Device) -> float | None:
  """Dense bf16 peak of one device, or None where it is not known (CPUs)."""
  for name, flops in _PEAK_FLOPS.items():
    if name.lower() in device.device_kind.lower():
      return flops
  return None


class StepProfiler:
  """Traces steps [first, first + count) into `folder`, for Perfetto and xprof.

  Args:
    folder: The trace goes to folder/plugins/profile/….
    first: The first step to trace, or None for none.
    count: Number of steps.
  """

  def __init__(self, folder: pathlib.Path, first: int | None, count: int):
    self._folder = folder
    self._first = first
    self._count = count
    self._running_since: int | None = None

  def before_step(self, step: int) -> None:
    """`step` steps are done and another one follows."""
    if step == self._first and jax.process_index() == 0:
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
      self._running_since = step

  def after_step(self, step: int, result: object) -> None:
    """`step` steps are dispatched; waits for `result` where the trace ends with it."""
    if self._running_since is not None and step >= self._running_since + self._count:
      jax.block_until_ready(result)
      self.close()

  def close(self) -> None:
    if self._running_since is not None:
      jax.profiler.stop_trace()
      self._running_since = None
