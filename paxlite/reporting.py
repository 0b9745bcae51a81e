"""What the training loop says while it runs, and where its time goes."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from paxlite import profiling
from paxlite.metrics import Metrics, to_host
from paxlite.summaries import Summaries
from paxlite.task import Batch
from paxlite.train_state import TrainState

if TYPE_CHECKING:
  from paxlite.trainer import Trainer


class Reporter:
  """Reads metrics from the device one step late, and keeps the clock of productive time."""

  def __init__(self, trainer: 'Trainer', summaries: Summaries):
    self._trainer = trainer
    self._goodput = trainer.goodput
    self._summaries = summaries
    self._pending: tuple[int, Metrics, jax.Array] | None = None
    self._var_norm = jax.jit(optax.tree.norm)
    self._last_step = 0
    self._last_time = 0.0
    self._last_loss: Any = None  # an array; jax.Array has no is_ready for type checkers
    self._peak = profiling.peak_flops(trainer.mesh.devices.flat[0].device_kind)

  @property
  def started(self) -> bool:
    """Whether a step was done."""
    return self._last_loss is not None

  @property
  def last_loss(self) -> float:
    """Of the last step; waits for it."""
    return float(np.asarray(self._last_loss))

  def next_batch(self, batches: Iterator[Batch]) -> Batch:
    """The next batch; waiting for it counts as such where the device had nothing else to do."""
    before = time.perf_counter()
    with self._goodput.spent_on('data'):
      batch = next(batches)
    if self._last_loss is not None and not self._last_loss.is_ready():
      self._goodput.excuse(time.perf_counter() - before, 'data')
    return batch

  def step(self, step: int, metrics: Metrics, state: TrainState) -> None:
    """Step `step` is dispatched: reports the one before if that is due."""
    self.flush()
    self._goodput.reached(step)
    self._last_loss = metrics['Metrics/total_loss'].value
    if step % self._trainer.summary_interval == 0 or step == self._trainer.max_steps:
      self._pending = (step, metrics, self._var_norm(state.params))

  def flush(self) -> None:
    """Reports what is pending; waits for the device to get there."""
    if self._pending is None:
      return
    step, metrics, var_norm = self._pending
    self._pending = None
    scalars = to_host(metrics) | {'learning/var_norm': float(var_norm)}
    self._summaries.train(step, scalars, self._speed(step))
    self._goodput.write()
    self._trainer.saver.check_skipped(int(scalars['learning/skipped_in_a_row']), step)

  def start_clock(self, step: int, state: TrainState) -> None:
    """Time and steps before now count for nothing: compilation and the first step are over."""
    self._var_norm(state.params).block_until_ready()  # compiled here
    self._goodput.switch('step')
    self._last_step, self._last_time = step, time.perf_counter()

  def roll_back(self, step: int) -> None:
    """The run goes on from an earlier step."""
    self._pending = None
    self._goodput.roll_back(step)
    self._last_step, self._last_time = step, time.perf_counter()

  @contextlib.contextmanager
  def clock_stopped(self, state: TrainState, kind: str) -> Iterator[None]:
    """A context whose time is of a kind of goodput.KINDS; what came before is done and reported."""
    self.flush()
    jax.block_until_ready(state)  # queued steps are training, not evaluation
    before = time.perf_counter()
    with self._goodput.spent_on(kind):
      yield
    self._last_time += time.perf_counter() - before

  def _speed(self, step: int) -> dict[str, float | None]:
    now = time.perf_counter()
    steps = step - self._last_step
    if not steps:  # the first step alone
      return dict.fromkeys(('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu'))
    seconds = (now - self._last_time) / steps
    self._last_step, self._last_time = step, now
    tokens = self._trainer.data.batch_size * self._trainer.seq_len / seconds
    flops = tokens * self._trainer.flops_per_token / self._trainer.mesh.size
    return {
      'tokens_per_second': tokens,
      'step_seconds': seconds,
      'model_tflops': flops / 1e12,  # per device
      'mfu': None if self._peak is None else flops / self._peak,
    }
