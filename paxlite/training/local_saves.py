"""Keeps the local states of a run while it is trained."""

from collections.abc import Callable

from paxlite.local_checkpoints.local_states import LocalCheckpoints
from paxlite.losses.metrics import Metrics
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.state_store import StateStore
from paxlite.training.train_state import TrainState


class LocalSaves(Callback):
  """Keeps a state on each host when it is due; see LocalCheckpoints.

  Args:
    store: The states of the run.
    local: Those on this host.
    wait: Waits until the best state is written, because a run that continues from a local state
      does not repeat the evaluation before it.
  """

  def __init__(self, store: StateStore, local: LocalCheckpoints, wait: Callable[[], None]):
    self._store, self._local, self._wait = store, local, wait
    self._began = 0

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    self._local.begin(step)
    self._began = step

  def before_step(self, state: TrainState, step: int, loop: Loop) -> None:
    if step > self._began and self._local.due(step):
      self._wait()
      self._local.save(*self._store.described(state, step, loop.metadata(step)))

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    self._local.reported(step - 1)

  def close(self) -> None:
    self._local.close(saved=max(self._store.checkpoints.steps(), default=-1))
