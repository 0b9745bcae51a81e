"""Reports of the training loop while it runs, and the clock of productive time."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from paxlite.runtime.goodput import Goodput
from paxlite.training.in_flight import StepsInFlight
from paxlite.training.metrics import Metrics, to_host
from paxlite.training.summaries import Summaries
from paxlite.training.task import Batch
from paxlite.training.train_state import TrainState

_LINE_SECONDS = 10  # at most, between two lines on the terminal, unless a step takes longer
_SKIPS_SHOWN = 3  # steps without a finite gradient that have a line each


@dataclasses.dataclass(frozen=True)
class Throughput:
  """Turns seconds per step into speeds.

  Attributes:
    tokens: Tokens of a step, over all devices.
    flops: Model FLOPs of a step, per device.
    peak: FLOP/s that a device can do at most; None where that is not known.
  """

  tokens: int
  flops: float
  peak: float | None

  def speeds(self, seconds: float | None) -> dict[str, float | None]:
    """Speeds where a step takes so many seconds; all are None where `seconds` is."""
    if seconds is None:
      return dict.fromkeys(('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu'))
    flops = self.flops / seconds
    return {
      'tokens_per_second': self.tokens / seconds,
      'step_seconds': seconds,
      'model_tflops': flops / 1e12,
      'mfu': None if self.peak is None else flops / self.peak,
    }


class Reporter:
  """Reads metrics from the device one step late, and keeps the clock of productive time.

  Args:
    goodput: Records what the time is spent on.
    summaries: Writes the metrics; also an attribute.
    throughput: Computes the speed of steps.
    is_due: Whether the metrics of a step are written.
    on_skipped: Called with the number of skipped steps in a row, and the last of them.
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
    """Whether a step was trained."""
    return self._last_loss is not None

  @property
  def last_loss(self) -> float:
    """The loss of the last step; waits for the device."""
    return float(np.asarray(self._last_loss))

  def next_batch(self, batches: Iterator[Batch]) -> Batch:
    """The next batch; waiting for it counts as such where the device had nothing else to do."""
    before = time.perf_counter()
    with self._goodput.spent_on('data'):
      batch = next(batches)
    self._drawn_at = time.perf_counter()
    if self._last_loss is not None and not self._last_loss.is_ready():
      self._goodput.excuse(self._drawn_at - before, 'data')
    return batch

  def step(self, step: int, metrics: Metrics, state: TrainState) -> None:
    """Step `step` is dispatched: waits for the one before, and reports it if that is due."""
    if not self.started:
      self._start_clock(step, state)
    self.flush()
    self._in_flight.add(step, metrics)
    self._goodput.reached(step)
    self._last_loss = metrics['Metrics/total_loss'].value
    if self._is_due(step):
      self._pending = (step, metrics, self._var_norm(state.params))

  def flush(self) -> None:
    """Reports what is pending; waits for the device to get there."""
    if self._pending is None:
      return
    step, metrics, var_norm = self._pending
    self._pending = None
    scalars = to_host(metrics) | {'learning/var_norm': float(var_norm)}
    self.summaries.train(step, scalars, self._throughput.speeds(self._records.read(step)))
    self._lines.read(step)  # a record has a line too
    self._goodput.write()

  def _start_clock(self, step: int, state: TrainState) -> None:
    """Waits for the first step; time and steps before now count for nothing."""
    jax.block_until_ready(state)
    self.summaries.say(f'First step: {time.perf_counter() - self._drawn_at:.2f} s.')
    self._var_norm(state.params).block_until_ready()  # compiled here
    self._goodput.switch('step')
    self._records.start(step)
    self._lines.start(step)

  def roll_back(self, spiked: int, step: int) -> None:
    """The run continues from `step`, as the loss of step `spiked` was a spike."""
    self.summaries.drop_records_after(step, evaluated=step)
    self.summaries.say(f'The loss spiked at step {spiked:,}: back to the checkpoint of {step:,}.')
    self._pending = None
    self._goodput.roll_back(step)
    self._records.start(step)
    self._lines.start(step)

  @contextlib.contextmanager
  def clock_stopped(self, state: TrainState, kind: str) -> Iterator[None]:
    """A context whose time is of a kind of goodput.KINDS; what came before is done and reported."""
    self.flush()
    self._in_flight.drain()
    jax.block_until_ready(state)  # queued steps are training, not evaluation
    before = time.perf_counter()
    with self._goodput.spent_on(kind):
      yield
    seconds = time.perf_counter() - before
    self._records.leave_out(seconds)
    self._lines.leave_out(seconds)

  def _done(self, step: int, metrics: Metrics) -> None:
    """The device has finished a step: reports what cannot wait for the next record."""
    in_a_row = int(np.asarray(metrics['learning/skipped_in_a_row'].value))  # waits for it
    if in_a_row:
      self._report_skip(step)
      self._on_skipped(in_a_row, step)
    late = step > self._lines.step and self._lines.seconds >= _LINE_SECONDS
    if late or not self._lines.read_once:
      speeds = self._throughput.speeds(self._lines.read(step))
      self.summaries.progress(step, to_host(metrics), speeds)
      self._goodput.write()

  def _report_skip(self, step: int) -> None:
    self._skips += 1
    if self._skips <= _SKIPS_SHOWN:
      self.summaries.say(
        f'Step {step:,} has a gradient or loss that is not finite: it changes nothing.'
      )
    if self._skips == _SKIPS_SHOWN:
      self.summaries.say('More of such steps are counted (learning/skipped_steps) and not printed.')


class _Clock:
  """Time and steps from one reading to the next.

  Attributes:
    step: The step of the last reading.
    read_once: Whether there was one.
  """

  def __init__(self) -> None:
    self.read_once = False
    self.start(0)

  def start(self, step: int) -> None:
    """Time and steps before now count for nothing."""
    self.step, self._time = step, time.perf_counter()

  def leave_out(self, seconds: float) -> None:
    """Leaves out seconds that were spent on something else since the last reading."""
    self._time += seconds

  @property
  def seconds(self) -> float:
    """Since the last reading."""
    return time.perf_counter() - self._time

  def read(self, step: int) -> float | None:
    """Seconds a step since the last reading; None where there was no step."""
    steps = step - self.step
    seconds = self.seconds / steps if steps else None
    self.start(step)
    self.read_once = True
    return seconds
