"""Saves a state together with where the data stands, and goes back to what was saved."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.core.errors import TrainingError, UserError
from paxlite.data.base import Input, Seekable, place
from paxlite.data.fingerprints import fingerprint
from paxlite.training.states import States
from paxlite.training.train_state import TrainState

log = logging.getLogger('paxlite')


@dataclasses.dataclass
class Saver:
  """The checkpoints of a run's steps.

  Attributes:
    states: Makes, restores and writes states.
    data: Training input.
    enabled: Whether checkpoints are written.
    stop_on_failure: Whether one that cannot be written ends the run.
    max_rollbacks: How often a run may go back.
    accept_changes: Whether it may go on with other data than it was trained on before.
  """

  states: States
  data: Input
  enabled: bool = True
  stop_on_failure: bool = False
  max_rollbacks: int = 0
  accept_changes: bool = False

  def __post_init__(self):
    self._skipped_batches = 0
    self._rollbacks = 0
    self._last_rollback: int | None = None
    self._resumed: int | None = None

  def batch_of(self, step: int) -> int:
    """The number of a step's batch in the order of the data."""
    return step + self._skipped_batches

  def evaluation_is_due(self, step: int) -> bool:
    """Whether the run that saved `step` left before it could evaluate it."""
    return bool(self.states.notes(step).get('unevaluated', False))

  def resume(self, step: int) -> None:
    """Puts the data where it stood at `step`; raises UserError where it cannot go on from there.

    Done again for the same step, it does nothing.
    """
    if self._resumed == step:
      return
    self._resumed = step
    notes = self.states.notes(step)
    self._skipped_batches = int(notes.get('skipped_batches', 0))
    self._rollbacks = int(notes.get('rollbacks', 0))
    if isinstance(self.data, Seekable) and step:
      positions = notes.get('positions')
      if positions is None or len(positions) != jax.process_count():
        stood = 'no position' if positions is None else f'positions of {len(positions)} processes'
        raise UserError(
          f'{self.data.name}: the checkpoint of step {step} holds {stood} of the data, and '
          f'{jax.process_count()} read it: continue with as many processes as before'
        )
      position = np.array(positions[jax.process_index()], np.int64)
      self.data.seek(self.batch_of(step), position)
    # checkpoints from before there were fingerprints have none
    if self._fingerprint not in (None, notes.get('fingerprint', self._fingerprint)):
      changed = f'{self.data.name} is not what the checkpoint of step {step} was trained on'
      if not self.accept_changes:
        raise UserError(
          f'{changed}: its contents have changed since, so that rows would be read twice or never. '
          'Put them back, choose another --job_log_dir, or continue with the change: '
          '--accept_changes'
        )
      if jax.process_index() == 0:
        log.warning('%s; the run goes on with it, as --accept_changes says', changed)

  @functools.cached_property
  def _fingerprint(self) -> int | None:
    return fingerprint(self.data)

  def save(self, state: TrainState, step: int, unevaluated: bool = False) -> None:
    """Saves in the background, unless the step is saved.

    Args:
      state: After `step` steps.
      step: The data stands before its batch.
      unevaluated: Whether an evaluation is due that the run which goes on has to do.

    Raises:
      TrainingError: too many steps before were skipped, or the last save failed and has to stop
        the run.
    """
    self.check_skipped(int(state.skipped_in_a_row), step)
    if not self.enabled:
      return
    notes: dict[str, Any] = {}
    if self._skipped_batches:
      notes['skipped_batches'] = self._skipped_batches
      notes['rollbacks'] = self._rollbacks
    if unevaluated:
      notes['unevaluated'] = True
    if self._fingerprint is not None:
      notes['fingerprint'] = self._fingerprint
    if isinstance(self.data, Seekable):
      mine = self.data.position(self.batch_of(step))
      halves = np.ascontiguousarray(mine, np.int64).view(np.int32)  # JAX would cut 64 bits off
      gathered = np.asarray(multihost_utils.process_allgather(halves)).reshape(-1, *halves.shape)
      notes['positions'] = gathered.view(np.int64).tolist()
    self.states.save(step, state, notes)
    if self.stop_on_failure:
      self.states.checkpoints.raise_failure()

  def check_skipped(self, in_a_row: int, step: int) -> None:
    """Raises TrainingError when the `in_a_row` steps before `step` were skipped, at the limit."""
    limit = self.states.task.max_skipped_steps
    if in_a_row >= limit:
      first = step - in_a_row
      raise TrainingError(
        f'{in_a_row} steps in a row had a gradient that is not finite, from step {first} on '
        f'(MAX_SKIPPED_STEPS={limit}). The last good state is that of step {first}; lower '
        'LEARNING_RATE, or look at the data that came then: '
        f'{place(self.data, self.batch_of(first))}'
      )

  def check_skipped_in_all(self, skipped: int, steps: int) -> None:
    """Raises TrainingError when most of the steps of a run that is complete were skipped."""
    if 2 * skipped > steps:
      raise TrainingError(
        f'{skipped:,} of {steps:,} steps had a gradient or loss that is not finite and changed '
        'nothing. What the others trained is saved; lower LEARNING_RATE, or look at the data'
      )

  def save_last_good(self, state: TrainState, step: int) -> None:
    """Saves the state as it was before the steps that were skipped last, if it is not there.

    They have changed nothing but counters.
    """
    in_a_row = int(state.skipped_in_a_row)
    newest = max(self.states.checkpoints.steps(), default=-1)
    if not in_a_row or newest >= step - in_a_row:
      return
    zero = state.skipped_in_a_row * 0
    good = dataclasses.replace(
      state,
      step=state.step - in_a_row,
      skipped=state.skipped - in_a_row,
      skipped_in_a_row=zero,
    )
    self.save(good, step - in_a_row)

  def roll_back(self, step: int) -> tuple[TrainState, int]:
    """The last good checkpoint before `step`, and its step; the data goes on where it is.

    Where no checkpoint was saved since the last time, it is the one before, if there is one.

    Raises:
      TrainingError: there is none, or the run went back too often.
    """
    checkpoints = self.states.checkpoints
    checkpoints.wait()
    where = f'the loss spiked at step {step:,}'
    hint = f'lower LEARNING_RATE, or look at {place(self.data, self.batch_of(step - 1))}'
    if self._rollbacks >= self.max_rollbacks:
      raise TrainingError(
        f'{where}, after {self._rollbacks} rollbacks (MAX_ROLLBACKS={self.max_rollbacks}): {hint}'
      )
    found = None
    if self._last_rollback is not None and checkpoints.steps()[-1:] == [self._last_rollback]:
      found = checkpoints.roll_back(self._last_rollback)
    if found is None:
      found = checkpoints.roll_back(step)
    if found is None:
      raise TrainingError(f'{where}, and there is no checkpoint to go back to: {hint}')
    self._rollbacks += 1
    self._last_rollback = found
    self._skipped_batches += step - found
    return self.states.restored(found)[0], found
