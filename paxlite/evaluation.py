"""One pass over an evaluation input: weighted means over every example, each counted once."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from paxlite import partitioning
from paxlite.errors import UserError
from paxlite.inputs.base import Batch, Input, prefetch
from paxlite.metrics import Mean, Metrics
from paxlite.summaries import Summaries
from paxlite.task import Task
from paxlite.train_state import TrainState


class Evaluator:
  """Evaluates the parameters of states on inputs.

  Args:
    task: What gives the metrics.
    mesh: Where batches go.
    rules: Logical axes to mesh axes.
    inputs: Evaluation inputs by name.
    progress: Called after every batch but the last.
  """

  def __init__(
    self,
    task: Task,
    mesh: Mesh,
    rules: partitioning.Rules,
    inputs: Mapping[str, Input],
    progress: Callable[[], None] = lambda: None,
  ):
    self._progress = progress
    self._inputs = inputs
    self._sharding = partitioning.batch_sharding(mesh, rules)

    @jax.jit
    def metrics(params: Any, overwritten: Any, batch: dict[str, jax.Array]) -> Metrics:
      with partitioning.activate(mesh, rules):
        return task.loss(params, batch, overwritten=overwritten)[1]

    def step(state: TrainState, batch: dict[str, jax.Array]) -> Metrics:
      with task.compiling(mesh, rules):
        return metrics(state.params, state.overwritten, batch)

    self._step: Callable[[TrainState, dict[str, jax.Array]], Metrics] = step

  def check(self) -> None:
    """Draws a batch of every input: one that cannot be read is better known before training."""
    for data in self._inputs.values():
      batches = device_batches(data, self._sharding)
      next(batches, None)
      batches.close()

  def report(self, state: TrainState, step: int, summaries: Summaries) -> None:
    """Evaluates on every input and writes what came out."""
    for name in self._inputs:
      before = time.perf_counter()
      metrics = self(name, state)
      summaries.evaluation(step, name, metrics, time.perf_counter() - before)

  def __call__(self, name: str, state: TrainState) -> dict[str, float]:
    """Metrics over input `name`; bits_per_byte too where the input knows its bytes."""
    data = self._inputs[name]
    mean = Mean()
    pending: Metrics | None = None
    for batch in device_batches(data, self._sharding):
      metrics = self._step(state, batch)
      if pending is not None:  # read one batch late: the device computes meanwhile
        mean.add(jax.device_get(pending))
        self._progress()
      pending = metrics
    if pending is not None:
      mean.add(jax.device_get(pending))
    result = mean.result()
    count = mean.weight('fraction_of_correct_next_step_preds')
    result['num_predictions'] = count
    bytes_per_token = getattr(getattr(data, 'source', None), 'bytes_per_token', None)
    if bytes_per_token:
      xent = result['avg_xent'] * mean.weight('avg_xent') / max(count, 1)  # of a target
      result['bits_per_byte'] = xent / math.log(2) / bytes_per_token
    return result


def device_batches(data: Input, sharding: jax.sharding.NamedSharding, start: int | None = None):
  """Global batches on the mesh, made two ahead in a thread: from step `start`, or one eval pass."""
  rows = partitioning.process_rows(sharding, data.batch_size)
  host = data.eval_batches(rows) if start is None else data.train_batches(start, rows)
  put = functools.partial(to_mesh, sharding=sharding, batch_size=data.batch_size)
  return prefetch(map(put, _told(data.name, host)), size=2)


def _told(name: str, batches: Iterator[Batch]) -> Iterator[Batch]:
  """`batches`, with UserError where a file is gone, or its disk."""
  try:
    yield from batches
  except OSError as e:
    what = f'{e.filename}: {e.strerror}' if e.filename else str(e)
    raise UserError(
      f'the data {name} can no longer be read ({what}): put it back and start the run again'
    ) from None


def to_mesh(
  batch: Mapping[str, np.ndarray], sharding: jax.sharding.NamedSharding, batch_size: int
) -> dict[str, jax.Array]:
  """This process's rows of a batch as global arrays [batch_size, T]."""
  first = partitioning.process_rows(sharding, batch_size).start

  def make(rows: np.ndarray) -> jax.Array:
    def part(index: Any) -> np.ndarray:
      start, stop, _ = index[0].indices(batch_size)
      return rows[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((batch_size, *rows.shape[1:]), sharding, part)

  return {k: make(v) for k, v in batch.items()}
