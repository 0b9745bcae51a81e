"""Repeats steps of a run from one of its checkpoints, with the run's own data and program.

A step is a function of the state, of the batch and of the step's number, and the batch is a
function of the step's number. So whatever a run did can be done again. Nothing is written. Of a run
in an object store, the records and the checkpoints that are needed are copied to this machine.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

import jax
from jax.stages import Compiled

from paxlite import extensions
from paxlite.checkpointing.checksums import damage, step_of
from paxlite.core.errors import AbsentError, UserError, listed
from paxlite.data.base import OnPolicyInput
from paxlite.data.device_batches import StepBatches
from paxlite.data.fingerprints import change
from paxlite.files import schemes
from paxlite.files.schemes import scheme_of
from paxlite.losses.metrics import Metrics
from paxlite.processes.process_messages import meet
from paxlite.programs.first_start import as_begun, dated, in_steps, with_positions
from paxlite.programs.run import Run
from paxlite.programs.run_checks import TRAINING
from paxlite.programs.run_folder import check_folder
from paxlite.proof.starts import MESH, of_span, other_values, starts
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer


def copied(run: Run) -> Run:
  """Returns a run with a folder of its records, copied from an object store if necessary.

  The run in the store is not touched, and may be training. Raises UserError if there is no run in
  the store, or it cannot be used.
  """
  if run.address is None:
    return run
  folder = schemes.records_of(run.address)
  with contextlib.suppress(AbsentError):
    scheme_of(run.address).copy(f'{run.address}/reference')
  with contextlib.suppress(UserError):  # there is none, as a replay says
    scheme_of(run.address).checkpoints(run.address)  # what describes the checkpoints
  return dataclasses.replace(run, folder=folder)


class Replay:
  """Repeats steps of a run.

  Args:
    run: The run; if it is in an object store, one that `copied` has returned.

  Raises:
    UserError: The folder holds no run, or the experiment is not the one that it was trained with.
  """

  def __init__(self, run: Run):
    self._stored: set[int | None] | None = None  # the steps that are in the store
    if run.address is not None:
      folders = scheme_of(run.address).checkpoints(run.address)
      self._stored = {step_of(folder.name) for folder in folders}
    run = with_positions(in_steps(dated(as_begun(run))))
    self.run = dataclasses.replace(run, read_only=True, save=False)
    check_folder(self.run)
    if not self.run.checkpoints().steps():
      raise UserError(f'{run.place} holds no checkpoint, so nothing can be replayed')
    self.trainer: Trainer = self.run.trainer()
    if isinstance(self.trainer.data.input, OnPolicyInput):
      raise UserError(
        'a run that generates its training texts cannot be replayed: it does not keep them'
      )
    for complete in extensions.added('inputs'):
      complete(self.run, {TRAINING: self.trainer.data.input}, lambda: None)

  @property
  def steps(self) -> list[int]:
    """The steps of the checkpoints, in order."""
    steps = self.trainer.store.checkpoints.steps()
    return steps if self._stored is None else [step for step in steps if step in self._stored]

  def check(self, step: int) -> None:
    """Raises UserError unless there is an undamaged checkpoint of a step; 0 is the beginning."""
    if not step:
      return
    if step not in self.steps:
      shown = ', '.join(map(str, self.steps))
      raise UserError(f'{self.run.place} has no checkpoint of step {step}; it has {shown}')
    folder = self._complete(step)
    if found := damage(folder):
      raise UserError(f'{folder} is damaged: {found}')

  def state(self, step: int) -> TrainState:
    """Returns the state of a checkpoint, or the one that the run began with (`step` is 0)."""
    if step:
      self._complete(step)
      try:
        return self.trainer.store.restored(step)[0]
      except Exception:
        if step in self.steps:
          raise
        raise UserError(
          f'the checkpoint of step {step} was deleted meanwhile, perhaps by a run that still '
          'trains: wait for its end, or keep more with CHECKPOINT_MAX_TO_KEEP'
        ) from None
    with tempfile.TemporaryDirectory() as empty:
      new = dataclasses.replace(self.run, folder=pathlib.Path(empty), address=None)
      store = new.store()
      store.batch_size = self.trainer.store.batch_size
      state, begun = store.initial()
      if begun:
        own = ', '.join(map(str, self.steps))
        raise UserError(
          f'{self.run.place} continued the state of another run from step {begun}, so it has no '
          f'start to replay from: replay it between two of its checkpoints ({own})'
        )
      return state

  def _complete(self, step: int) -> pathlib.Path:
    """Returns the folder of a checkpoint after copying its files here."""
    folder = self.trainer.store.checkpoints.folder(step)
    schemes.complete(folder)
    meet()  # hosts take unlike times to copy it
    return folder

  def check_same_course(self, first: int, last: int) -> None:
    """Raises UserError if the steps between two checkpoints cannot be done again as they were.

    After a rollback, batches were left out between them. A start with other values, or with other
    code, has changed the training since, or the data has changed.
    """
    data = self.trainer.data
    if why := change(data.identity, self.trainer.store.metadata(last)):
      raise UserError(
        f'{data.input.name} is not the data of {self.run.place} up to step {last:,}: {why}. Put '
        'it back'
      )
    changed = lambda start: [
      text
      for name, text in other_values(self.run.experiment, start.values).items()
      if name not in MESH
    ]
    known = starts(self.run.folder)
    for start in known:
      if start.code_changes and start.step > first:
        raise UserError(
          f'{self.run.place}: the steps up to {start.step:,} were trained with other code: '
          f'{listed(start.code_changes)}. The steps from {start.step:,} on can be replayed'
        )
    for start in of_span(self.run.folder, first, last):
      if texts := changed(start):
        since = max(i for i, x in enumerate(known) if changed(x)) + 1
        way = (
          f'The steps from {known[since].step:,} on can be replayed'
          if since < len(known)
          else 'State the values of the run'
        )
        raise UserError(f'{self.run.place}: after step {first:,}, {listed(texts)}. {way}')
    of = lambda step: self.trainer.store.metadata(step).get('skipped_batches', 0) if step else 0
    if of(first) != of(last):
      raise UserError(
        f'between steps {first:,} and {last:,} the run rolled back after a loss spike: choose two '
        'checkpoints after that, or before'
      )

  @contextlib.contextmanager
  def stepping(self, first: int) -> Iterator['Stepping']:
    """A context in which the steps after `first` can be done, one after the other."""
    trainer = self.trainer
    task = trainer.store.task
    trainer.data.resume(first, trainer.store.metadata(first) if first else {})
    batches = trainer.data.batches(first, task.batch_sharding)
    compiler = dataclasses.replace(trainer.compiler, on_compiled=lambda compiled: None)
    try:
      with task.compiling():
        shapes = batches.shapes()
        step, _ = compiler(task.lower_step(shapes), (task.abstract, shapes))
      yield Stepping(batches, step)
    finally:
      batches.close()


@dataclasses.dataclass(frozen=True)
class Stepping:
  """Draws batches and does steps."""

  batches: StepBatches  # the batches of the steps, in order
  step: Compiled  # the executable of the train step, which overwrites the state

  def draw(self, state: TrainState) -> dict[str, jax.Array]:
    """Returns the next batch."""
    return self.batches.draw(state.params)

  def __call__(
    self, state: TrainState, batch: Mapping[str, jax.Array]
  ) -> tuple[TrainState, Metrics]:
    """Returns the state after a step, and its metrics."""
    done: tuple[TrainState, Metrics] = self.step(state, batch)
    return done
