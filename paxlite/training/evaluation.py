"""Evaluation on complete inputs: weighted means in which every example counts exactly once."""

import logging
import time
from collections.abc import Callable, Mapping

import jax

from paxlite.cli import live_line
from paxlite.core.trees import PyTree
from paxlite.data.base import Input
from paxlite.data.device_batches import DeviceBatches
from paxlite.losses.metrics import Mean, Metrics
from paxlite.parallel import partitioning
from paxlite.processes import preemption
from paxlite.tracking.summaries import Summaries
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.task import TOTAL
from paxlite.training.train_state import TrainState

log = logging.getLogger('paxlite')


class StoppedError(Exception):
  """An evaluation ended early, because it was asked to."""


class Evaluator:
  """Evaluates the parameters of train states on inputs.

  Args:
    task: Computes the metrics, on its mesh.
    inputs: Evaluation inputs by name.
    progress: Called after every batch except the last.
    max_segments: The most segments of a packed row, padding included; 0: any number.
    stops: Whether to end early; called after every batch except the last.
  """

  def __init__(
    self,
    task: ShardedTask,
    inputs: Mapping[str, Input],
    progress: Callable[[], None] = lambda: None,
    max_segments: int = 0,
    stops: Callable[[], bool] = lambda: False,
  ):
    self._progress = progress
    self._stops = stops
    self._max_segments = max_segments
    self.inputs = inputs
    for name, data in inputs.items():
      if lost := getattr(getattr(data, 'source', None), 'lost', ''):
        log.warning('%s: %s. No bits per byte are computed', name, lost)
    self._sharding = task.batch_sharding
    self._task = task.task

    @jax.jit
    def metrics(params: PyTree, fp8_state: PyTree, batch: dict[str, jax.Array]) -> Metrics:
      with partitioning.activate(task.mesh, task.rules):
        return task.task.loss_and_metrics(params, batch, fp8_state=fp8_state)[1]

    def step(params: PyTree, fp8_state: PyTree, batch: dict[str, jax.Array]) -> Metrics:
      with task.compiling():
        return metrics(params, fp8_state, batch)

    self._step: Callable[[PyTree, PyTree, dict[str, jax.Array]], Metrics] = step

  def check(self) -> None:
    """Draws one batch of every input, so that an unreadable input is found before training."""
    for data in self.inputs.values():
      batches = self._batches(data)
      next(batches, None)
      batches.close()

  def _batches(self, data: Input) -> DeviceBatches:
    return DeviceBatches(data, self._sharding, max_segments=self._max_segments)

  def report(
    self, state: TrainState, step: int, summaries: Summaries
  ) -> dict[str, dict[str, float]]:
    """Evaluates `state` on every input, writes the metrics and returns them by input.

    Raises:
      StoppedError: `stops` returned True. Some inputs may have been written.
    """
    found = {}
    for name in self.inputs:
      before = time.perf_counter()
      with (
        preemption.evaluating(step),
        live_line.working(f'Evaluating {name} at step {step:,}', summaries.say) as progress,
      ):
        metrics = self(name, state, progress)
      summaries.evaluation(step, name, metrics, time.perf_counter() - before, self._task.shown)
      found[name] = metrics
    return found

  def __call__(
    self, name: str, state: TrainState, progress: Callable[[str], None] = lambda text: None
  ) -> dict[str, float]:
    """Returns the metrics over input `name`; raises StoppedError if `stops` returned True.

    The total loss is that of one batch with all rows of the input.

    Args:
      name: Name of the input.
      state: Its parameters are evaluated.
      progress: Called after every batch with a text that says which one.
    """
    data = self.inputs[name]
    mean = Mean()
    pending: Metrics | None = None
    params = self._task.evaluated(state)  # once, as an average may have to come from the host
    for number, batch in enumerate(self._batches(data)):
      metrics = self._step(params, state.fp8_state, batch)
      if pending is not None:  # metrics are read one batch late, so that the device keeps computing
        mean.add(jax.device_get(pending))
        self._progress()
        if self._stops():
          raise StoppedError
        progress(f'batch {number:,}')
      pending = metrics
    if pending is not None:
      mean.add(jax.device_get(pending))
    found = mean.result()
    if not found:
      return found
    bytes_per_token = getattr(getattr(data, 'source', None), 'bytes_per_token', None)
    for key, loss in self._task.losses.items():
      found |= loss.of_evaluation(found[key], mean.weight(key), found, bytes_per_token)
    return found | {TOTAL: self._task.total(found)}
