"""Profiler traces of steps."""

import pathlib

import jax


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
