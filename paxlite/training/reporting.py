"""Reports from the running training loop, and the clock of productive time."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from paxlite.cli import live_line
from paxlite.core.round_numbers import round_up
from paxlite.losses.metrics import Metrics, to_host
from paxlite.tracking.summaries import Summaries
from paxlite.training.goodput import Goodput
from paxlite.training.in_flight import StepsInFlight
from paxlite.training.train_state import TrainState

# longest time between two lines in a log, and between two changes of the line on a terminal
_LOG_SECONDS, _LIVE_SECONDS = 10.0, 1.0
_SKIPS_SHOWN = 3  # number of skipped steps that are reported with a line each


@dataclasses.dataclass(frozen=True)
class Throughput:
  """Turns seconds per step into speeds."""

  tokens: int  # tokens per step, over all devices
  flops: float  # model FLOPs per step and device
  peak: float | None  # peak FLOP/s of a device; None if it is unknown

  def speeds(self, seconds: float | None) -> dict[str, float | None]:
    """Returns the speeds for `seconds` per step; all are None if `seconds` is None."""
    if seconds is None:
      return dict.fromkeys(('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu'))
    flops = self.flops / seconds
    return {
      'tokens_per_second': self.tokens / seconds, 'step_seconds': seconds,
      'model_tflops': flops / 1e12, 'mfu': None if self.peak is None else flops / self.peak,
    }  # fmt: skip


def line_is_due(step: int, last: int, seconds: float) -> bool:
  """Returns whether a log gets a line between two records.

  Args:
    step: The step that has been done.
    last: The step of the last line.
    seconds: The time since that line.
  """
  if seconds < _LOG_SECONDS / 2:
    return False
  interval = round_up(_LOG_SECONDS / (seconds / (step - last)))
  return step % interval == 0 and step - last >= interval / 2


class Reporter:
  """Reads metrics from the device one step late, and keeps the clock of productive time.

  Args:
    goodput: Records what the time is spent on.
    summaries: Writes the metrics. It is also an attribute.
    throughput: Computes the speed of steps.
    is_due: Whether the metrics of a step are written.
    on_skipped: Called with the number of skipped steps in a row, and with the last of these steps.
  """

  def __init__(
    self,
    goodput: Goodput,
    summaries: Summaries,
    throughput: Throughput,
    is_due: Callable[[int], bool],
    on_skipped: Callable[[int, int], None],
  ):
    self._goodput = goodput
    self.summaries = summaries
    self._throughput = throughput
    self._is_due = is_due
    self._on_skipped = on_skipped
    self._pending: tuple[int, Metrics, jax.Array] | None = None
    self._in_flight = StepsInFlight(self._done)
    self._var_norm = jax.jit(optax.tree.norm)
    self._records = _Clock()
    self._lines = _Clock()
    self._skips = 0
    self._drawn_at = 0.0
    self._last_loss: Any = None  # an array; jax.Array has no is_ready for type checkers

  @property
  def started(self) -> bool:
    """Whether at least one step was dispatched."""
    return self._last_loss is not None

  @contextlib.contextmanager
  def drawing(self) -> Iterator[None]:
    """A context that draws a batch; it counts as waiting for data only if the device ran idle."""
    before = time.perf_counter()
    with self._goodput.spent_on('data'):
      yield
    self._drawn_at = time.perf_counter()
    if self._last_loss is not None and not self._last_loss.is_ready():
      self._goodput.excuse(self._drawn_at - before, 'data')

  def step(self, step: int, metrics: Metrics, state: TrainState) -> None:
    """Notes that `step` is dispatched; waits for the step before, and reports it if that is due."""
    if not self.started:
      self._start_clock(step, state)
    self.flush()
    self._in_flight.add(step, metrics)
    self._goodput.reached(step)
    self._last_loss = metrics['Metrics/total_loss'].value
    if self._is_due(step):
      self._pending = (step, metrics, self._var_norm(state.params))

  def flush(self) -> None:
    """Reports the step with pending metrics, after the device has finished it."""
    if self._pending is None:
      return
    step, metrics, var_norm = self._pending
    self._pending = None
    scalars = to_host(metrics) | {'learning/var_norm': float(var_norm)}
    self.summaries.train(step, scalars, self._throughput.speeds(self._records.read(step)))
    self._lines.read(step)  # writing a record also prints a line
    self._goodput.write()

  def _start_clock(self, step: int, state: TrainState) -> None:
    """Waits for the end of the first step, which is not measured, and starts the clocks."""
    jax.block_until_ready(state)
    self.summaries.say(f'First step: {time.perf_counter() - self._drawn_at:.2f} s.')
    self._var_norm(state.params).block_until_ready()  # to compile it before the clocks start
    self._goodput.switch('step')
    self._records.start(step)
    self._lines.start(step)

  def roll_back(self, spiked: int, step: int) -> None:
    """Notes that the run continues from `step`, because the loss of step `spiked` was a spike."""
    self.summaries.drop_records_after(step, evaluated=step)
    self.summaries.say(
      f'The loss spiked at step {spiked:,}: rolled back to the checkpoint of {step:,}.'
    )
    self._pending = None
    self._goodput.roll_back(step)
    self._records.start(step)
    self._lines.start(step)

  @contextlib.contextmanager
  def clock_stopped(self, state: TrainState, kind: str) -> Iterator[None]:
    """A context whose time counts as `kind`, one of goodput.KINDS, and not as training.

    All steps before it are first finished and reported.
    """
    self.flush()
    self._in_flight.drain()
    jax.block_until_ready(state)  # the time of queued steps counts as training
    before = time.perf_counter()
    with self._goodput.spent_on(kind):
      yield
    seconds = time.perf_counter() - before
    self._records.leave_out(seconds)
    self._lines.leave_out(seconds)

  def _done(self, step: int, metrics: Metrics) -> None:
    """Waits until the device has finished a step; reports what cannot wait for the next record."""
    in_a_row = int(np.asarray(metrics['learning/skipped_in_a_row'].value))
    if in_a_row:
      self._report_skip(step)
      self._on_skipped(in_a_row, step)
    if self._lines.is_due(step, live_line.is_possible()) or not self._lines.read_once:
      speeds = self._throughput.speeds(self._lines.read(step))
      self.summaries.progress(step, to_host(metrics), speeds)
      self._goodput.write()

  def _report_skip(self, step: int) -> None:
    self._skips += 1
    if self._skips <= _SKIPS_SHOWN:
      self.summaries.say(f'Step {step:,} has a non-finite gradient or loss: it changes nothing.')
    if self._skips == _SKIPS_SHOWN:
      self.summaries.say('Further such steps are counted (learning/skipped_steps) but not printed.')


class _Clock:
  """A clock that measures time and steps from one reading to the next.

  Attributes:
    step: The step of the last reading.
    read_once: Whether the clock has been read.
  """

  def __init__(self) -> None:
    self.read_once = False
    self.start(0)

  def start(self, step: int) -> None:
    """Starts the clock at `step`; earlier time and steps are not counted."""
    self.step, self._time = step, time.perf_counter()

  def leave_out(self, seconds: float) -> None:
    """Subtracts seconds that were spent on something else since the last reading."""
    self._time += seconds

  @property
  def seconds(self) -> float:
    """Seconds since the last reading."""
    return time.perf_counter() - self._time

  def is_due(self, step: int, changes: bool) -> bool:
    """Returns whether it is time for a line between two records.

    Lines that stay are at round numbers of steps, some ten seconds apart.

    Args:
      step: The step that has been done.
      changes: Whether the line is one that changes.
    """
    if step <= self.step:
      return False
    if changes:
      return self.seconds >= _LIVE_SECONDS
    return line_is_due(step, self.step, self.seconds)

  def read(self, step: int) -> float | None:
    """Returns the seconds per step since the last reading, or None if there was no step."""
    steps = step - self.step
    seconds = self.seconds / steps if steps else None
    self.start(step)
    self.read_once = True
    return seconds
