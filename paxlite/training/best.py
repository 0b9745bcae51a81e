"""Keeps the best checkpoint of a run, and ends a run that does not get better any more."""

import contextlib
import dataclasses
import math
import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import UserError
from paxlite.core.run_files import MovedError, write_file
from paxlite.losses.metric_names import larger_is_better
from paxlite.tracking.summaries import Summaries
from paxlite.tracking.writers import EvalRecords, read_records
from paxlite.training.callbacks import Callback, Evaluations, LoopRequest
from paxlite.training.state_store import StateStore
from paxlite.training.train_state import TrainState

_OF_RUN = 'experiment.json', 'experiment.txt', 'config.json', 'config.txt'


@dataclasses.dataclass
class Best(Callback):
  """The best evaluation of a run so far."""

  # The run's job_log_dir. The state is in best/checkpoints, and the run's experiment.json in best/,
  # so that best/ can be evaluated and exported as a run.
  folder: pathlib.Path
  input: str  # name of the evaluation input
  metric: str  # name of the metric
  keeps: bool  # whether the state is saved
  patience: int  # training ends after so many evaluations in a row that were not better; 0: never
  own_disks: bool = False  # whether each process has a disk of its own
  # the states of the run; None if `evaluated` is called in place of `on_evaluation`
  store: StateStore | None = None
  value: float = math.nan  # the best value so far; NaN before the first evaluation
  step: int = 0  # the step of this value
  worse: int = 0  # number of evaluations since
  # whether larger values are better; None: the name of the metric says it
  larger: bool | None = None

  def __post_init__(self) -> None:
    folder = self.folder / 'best' / 'checkpoints'
    self._checkpoints = Checkpoints(folder, max_to_keep=1, own_disks=self.own_disks)

  @property
  def is_over(self) -> bool:
    """Whether training ends, because it does not get better any more."""
    return 0 < self.patience <= self.worse

  def resume(self, step: int) -> LoopRequest | None:
    """Notes the evaluations up to `step` of a run that continues from there."""
    self.value, self.step, self.worse = math.nan, 0, 0
    if jax.process_index() == 0:
      for record in read_records(self.folder / EvalRecords.name):
        value = record.get(self.metric)
        if record.get('input') == self.input and record['step'] <= step and value is not None:
          self._note(record['step'], value)
    if jax.process_count() > 1:
      noted = np.array([self.value, self.step, self.worse], np.float64).view(np.uint32)
      noted = np.asarray(multihost_utils.broadcast_one_to_all(noted)).view(np.float64)
      self.value, self.step, self.worse = float(noted[0]), int(noted[1]), int(noted[2])
    return self.END if self.is_over else None

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> LoopRequest | None:
    assert self.store is not None
    for line in self.evaluated(self.store, state, step, evaluations):
      summaries.say(line)
    return self.END if self.is_over else None

  def evaluated(
    self, store: StateStore, state: TrainState, step: int, evaluations: Evaluations
  ) -> list[str]:
    """Notes an evaluation and saves the state if it is the best; returns lines for the user.

    Raises UserError if there is no such metric.
    """
    metrics = evaluations[self.input]
    if self.metric not in metrics:
      raise UserError(
        f'BEST_METRIC={self.metric} is not a metric of the evaluation of {self.input}: '
        f'{", ".join(sorted(metrics))}'
      )
    if self._note(step, metrics[self.metric]):
      if not self.keeps:
        return []
      store.save(state, step, {}, self._checkpoints)
      return [f'best so far: {self.metric} {self.value:.4f} at step {step:,}, kept in best/']
    if not self.is_over:
      return []
    return [
      f'Training ends early at step {step:,}: no evaluation was better than step {self.step:,} '
      f'({self.metric} {self.value:.4f}) in {self.worse} (EARLY_STOPPING_PATIENCE)'
    ]

  def wait(self) -> None:
    """Waits until the best state is written, which the next evaluation may not repeat."""
    self._checkpoints.wait()

  def close(self) -> None:
    """Waits until the best state is written."""
    self._checkpoints.close()
    if self.keeps and jax.process_index() == 0 and self._checkpoints.steps():
      for name in _OF_RUN:
        if (self.folder / name).is_file():
          with contextlib.suppress(MovedError):  # Trainer says so
            write_file(self.folder / 'best' / name, (self.folder / name).read_bytes())

  def _note(self, step: int, value: float) -> bool:
    """Notes a value; returns whether it is the best."""
    is_larger = larger_is_better(self.metric) if self.larger is None else self.larger
    sign = -1 if is_larger else 1
    is_better = math.isnan(self.value) or sign * value < sign * self.value
    if is_better:
      self.value, self.step = value, step
    self.worse = 0 if is_better else self.worse + 1
    return is_better
