"""Keeps the local states of a run while it is trained."""

from collections.abc import Callable, Sequence

from paxlite.experiments.identity import fingerprint
from paxlite.local_checkpoints.attributes import LocalCheckpointing
from paxlite.local_checkpoints.local_states import LocalCheckpoints
from paxlite.losses.metrics import Metrics
from paxlite.programs.run import Run
from paxlite.training.best import Best
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.state_store import StateStore
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns what keeps the local states of a run, from which its store may restore."""
  e = run.experiment
  if not isinstance(e, LocalCheckpointing) or not e.LOCAL_CHECKPOINT_EVERY_N_STEPS:
    return []
  if not run.save or run.read_only:
    return []
  lose, identity = e.LOCAL_CHECKPOINT_EVERY_N_STEPS, fingerprint(e)
  local = LocalCheckpoints(e.LOCAL_CHECKPOINT_DIR, run.folder, lose, identity, run.accept_changes)
  trainer.store.local = local.restored
  best = [callback for callback in trainer.callbacks if isinstance(callback, Best)]
  return [LocalSaves(trainer.store, local, [each.wait for each in best])]


class LocalSaves(Callback):
  """Keeps a state on each host when it is due; see LocalCheckpoints.

  Args:
    store: The states of the run.
    local: Those on this host.
    waits: Wait until the best state is written, because a run that continues from a local state
      does not repeat the evaluation before it.
  """

  rank = -1  # before what may end the run or roll it back

  def __init__(
    self, store: StateStore, local: LocalCheckpoints, waits: Sequence[Callable[[], None]]
  ):
    self._store, self._local, self._waits = store, local, waits
    self._began = 0

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    self._local.begin(step)
    self._began = step

  def before_step(self, state: TrainState, step: int, loop: Loop) -> None:
    if step > self._began and self._local.due(step):
      for wait in self._waits:
        wait()
      self._local.save(*self._store.described(state, step, loop.metadata(step)))

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    self._local.reported(step - 1)

  def close(self) -> None:
    self._local.close(saved=max(self._store.checkpoints.steps(), default=-1))
