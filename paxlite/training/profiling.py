"""Profiler traces of steps."""

import pathlib
from collections.abc import Callable

import jax

from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_state import TrainState


class StepProfiler(Callback):
  """Traces steps [first, first + count) into `folder`, for Perfetto and xprof.

  Only process 0 writes a trace.

  Args:
    folder: The trace is written to folder/plugins/profile/….
    first: The first step to trace; None traces nothing.
    count: Number of steps to trace.
    last: The last step of the run, after which no trace starts.

  Attributes:
    on_traced: Called with the folder and the number of steps when a trace has them all.
  """

  def __init__(self, folder: pathlib.Path, first: int | None, count: int, last: int):
    self.on_traced: Callable[[pathlib.Path, int], None] = lambda folder, steps: None
    self._folder = folder
    self._first = first if jax.process_index() == 0 and first != last else None
    self._count = count
    self._running = False

  def is_due(self, step: int) -> bool:
    """Returns whether the trace starts or stops when `step` steps are done."""
    if self._first is None:
      return False
    return step >= self._first + self._count if self._running else step == self._first

  def before_step(self, state: TrainState, step: int, loop: Loop) -> None:
    if self.is_due(step):
      with loop.paused(state, 'profile'):  # so that the trace holds exactly these steps
        self._switch()

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    self.before_step(state, step, loop)

  def close(self) -> None:
    if self._running:
      jax.profiler.stop_trace()
      self._running = False

  def _switch(self) -> None:
    """Starts or stops the trace."""
    if self._running:
      self.close()
      self.on_traced(self._folder, self._count)
      return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Its hook in all calls slows a run and can crash it.
    jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
    self._running = True
