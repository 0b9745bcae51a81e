"""Initializes, restores and saves the train states of a run."""

import dataclasses
import logging
import pathlib
import sys
from collections.abc import Callable, Mapping

import jax
from flax import traverse_util
from jax.tree_util import KeyPath

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.checkpointing.restore import OVERWRITTEN, Restore, RestorePlan
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.checkpointing.source import Source, find_source
from paxlite.checkpointing.structure import shapes_of
from paxlite.core.errors import TrainingError, UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REFERENCE, path_name
from paxlite.files.json_files import read_object
from paxlite.training import moved_folder
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState

log = logging.getLogger('paxlite')


@dataclasses.dataclass
class StateStore:
  """Initializes, restores and saves the train states of a run."""

  task: ShardedTask  # defines the structure and the shardings of a state
  checkpoints: Checkpoints  # the checkpoints of the run
  # Rows of a global batch. A checkpoint of another batch size is refused.
  batch_size: int
  restore: Restore | None = None  # another checkpoint that a new run starts from
  # The checkpoint of a frozen reference model. Checkpoints of the run do not hold it.
  reference: Restore | None = None
  # Whether checkpoints hold only the trainable parameters. The frozen parameters are read from
  # `restore` at each start.
  trainable_only: bool = False
  start_over: bool = False  # whether the run may begin again if all of its checkpoints are damaged
  writes: bool = True  # whether checkpoints are written
  stop_on_failure: bool = False  # whether a checkpoint that cannot be written ends the run
  # Returns the step, tree and metadata of the newest local state: a state that is not among the
  # checkpoints. It gets a tree of shapes and shardings, and the step that it must be above.
  local: Callable[[PyTree, int], tuple[int, PyTree, JsonObject] | None] = lambda like, above: None
  # Says where to read the variables that are not in the run's own checkpoints. It is made when the
  # store is made, and raises UserError if the other checkpoint does not fit.
  plan: RestorePlan | None = dataclasses.field(init=False)
  # the same for the variables of the reference
  reference_plan: RestorePlan | None = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self._local_metadata: JsonObject | None = None  # of the local state that the run started from
    self.plan = self._make_plan()
    self.reference_plan = self._make_reference_plan()

  def _make_plan(self) -> RestorePlan | None:
    if self.restore is None or (self.checkpoints.steps() and not self.trainable_only):
      return None
    step = self.checkpoints.latest_good_step() if self.trainable_only else None
    frozen = None if step is None else Source(self.checkpoints.folder(step), pathlib.Path()).frozen
    source = find_source(self.restore.path, frozen=frozen)
    own = _without_reference(self.task.abstract)
    return RestorePlan(self.restore, own, source, self.task.quantizations)

  def _make_reference_plan(self) -> RestorePlan | None:
    if self.reference is None:
      return None
    step = self.checkpoints.latest_good_step()
    noted = None if step is None else self.metadata(step).get('reference')
    source = find_source(self.reference.path, frozen=noted)
    own = {'params': self.task.abstract.params[REFERENCE]}
    name = lambda of_state: of_state.replace(f'params/{REFERENCE}/', 'params/')
    quantizations = {name(k): v for k, v in self.task.quantizations.items() if name(k) != k}
    return RestorePlan(self.reference, own, source, quantizations)

  def initial(self) -> tuple[TrainState, int]:
    """Returns the state of the run's last good checkpoint, or a new state, and its step.

    A local state that is newer than all checkpoints is used instead of them.

    Raises:
      UserError: The checkpoint does not fit. Or all checkpoints are damaged, and the run may not
        start over.
    """
    found = self._newest_local() or self.checkpoints.restore_latest(self.restored)
    if found is None:
      self.checkpoints.start_over(self.start_over)
      # no plan was made if the run had checkpoints, even if they have turned out to be damaged
      self.plan = self.plan or self._make_plan()
      state = self._new()
      return state, int(state.step)
    step, (state, metadata) = found
    if (before := metadata['batch_size']) != self.batch_size:
      raise UserError(
        f'the checkpoint of step {step} has a global batch of {before}, but this run has '
        f'{self.batch_size}: data would be read twice or left out. Choose PERCORE_BATCH_SIZE so '
        'that PERCORE_BATCH_SIZE × devices is the same'
      )
    return state, step

  def last(self) -> tuple[TrainState, int]:
    """Returns the state to evaluate, and its step.

    It is the state of the last good checkpoint. Without checkpoints it is a new state with the
    parameters of `restore`, and the step is 0. Raises UserError if there is neither, or the
    checkpoint does not fit.
    """
    while (step := self.checkpoints.latest_good_step()) is not None:
      try:
        return self.restored(step)[0], step
      except (ValueError, OSError):
        if step in self.checkpoints.steps():
          raise
        self.checkpoints.close()  # a training run has deleted this checkpoint in the meantime
    self.checkpoints.start_over(accepted=False)
    if self.plan is None:
      raise UserError('the run holds no good checkpoint to evaluate: train first')
    return self._new(), 0

  def save(
    self, state: TrainState, step: int, metadata: Mapping[str, Json], to: Checkpoints | None = None
  ) -> None:
    """Saves a state in the background, unless there is a checkpoint of the step.

    If the run's folder is not at its path any more, the state is saved where the folder is now, or,
    where it was deleted, in a new one beside it, and the run ends.

    Args:
      state: The state after `step` steps.
      metadata: Further values to store in the checkpoint; they must be valid JSON.
      to: Checkpoints to add it to; None for those of the run.

    Raises:
      TrainingError: A checkpoint could not be written, and stop_on_failure is set. Or the folder of
        the run was moved, deleted or replaced.
    """
    if not self.writes:
      return
    folder, how, place = self.checkpoints.of_run, '', pathlib.Path()
    if to is None:
      how, place = moved_folder.seen_by_first_process(folder)
    if how:
      to = Checkpoints(place / 'checkpoints', sys.maxsize, record=SavedRecord(place))
    checkpoints = to or self.checkpoints
    checkpoints.save(
      step, self._on_disk(self._saved(state)), self._described(step) | dict(metadata)
    )
    if how:
      checkpoints.close()
      checkpoints.raise_failure()
      way_on = f'step {step:,} is saved in {place}: continue with --job_log_dir={place}'
      raise TrainingError(f'--job_log_dir={folder}: {how}; {way_on}')
    if self.stop_on_failure:
      checkpoints.raise_failure()

  def close(self) -> None:
    """Waits until all checkpoints are written."""
    self.checkpoints.close()

  def metadata(self, step: int) -> JsonObject:
    """Returns the metadata of a checkpoint; {} if the run has no checkpoint of `step`."""
    if self.is_local(step):
      return dict(self._local_metadata or {})
    path = self.checkpoints.folder(step) / 'data' / 'metadata'
    return read_object(path) if path.is_file() else {}

  def restored(self, step: int) -> tuple[TrainState, JsonObject]:
    """Returns the state of one of the run's checkpoints, and its metadata."""
    wanted = self._saved(self.task.abstract)
    # this backend cannot use the FP8 statistics of another backend: it starts with new ones
    prefix = f'{OVERWRITTEN}/'
    held = {k: v for k, v in self.checkpoints.shapes(step).items() if k.startswith(prefix)}
    changed = held != shapes_of({OVERWRITTEN: wanted.fp8_state})
    if changed:
      wanted = dataclasses.replace(wanted, overwritten={})
    surplus = prefix if changed else ''
    found, metadata = self.checkpoints.restore(step, self._on_disk(wanted), surplus)
    state = self._in_memory(found)
    if changed:
      new = self.task.new(lambda state: state.fp8_state, self.task.abstract.fp8_state)
      state = dataclasses.replace(state, overwritten=new)
    return self._with_frozen(state), metadata

  def is_local(self, step: int) -> bool:
    """Returns whether the run started from the local state of `step`."""
    return self._local_metadata is not None and self._local_metadata['step'] == step

  def described(
    self, state: TrainState, step: int, metadata: Callable[[], JsonObject]
  ) -> tuple[PyTree, int, Callable[[], JsonObject]]:
    """Returns the contents of a local state, and completes its metadata."""
    described = self._described(step)
    return self._on_disk(self._saved(state)), step, lambda: described | metadata()

  def _newest_local(self) -> tuple[int, tuple[TrainState, JsonObject]] | None:
    """Returns the newest local state, unless there is a newer checkpoint."""
    above = max(self.checkpoints.steps(), default=-1)
    found = self.local(self._on_disk(self._saved(self.task.abstract)), above)
    if found is None:
      return None
    step, tree, metadata = found
    ours = self._described(step)
    if any(metadata.get(kind) != ours.get(kind) for kind in ('frozen', 'reference')):
      log.warning(
        'the local state of step %d is not used: its frozen variables are different', step
      )
      return None
    self._local_metadata = metadata
    if not self.trainable_only:
      self.plan = None  # nothing is read from the other checkpoint
    state = self._with_frozen(self._in_memory(tree))
    return step, (state, metadata)

  def _described(self, step: int) -> JsonObject:
    """Returns what a checkpoint holds in addition to the metadata of the training loop."""
    described: JsonObject = {'step': step, 'batch_size': self.batch_size}
    if self.trainable_only and self.plan is not None:
      described['frozen'] = self.plan.source.fingerprint
    if self.reference_plan is not None:
      described['reference'] = self.reference_plan.source.fingerprint
    return described

  def _with_frozen(self, state: TrainState) -> TrainState:
    """Returns a state that was restored, with the variables that checkpoints do not hold."""
    if not self.trainable_only and self.reference_plan is None:
      return state
    trained = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(self._saved(state))}
    full = jax.tree_util.tree_map(lambda _: None, self.task.abstract.params)
    flat = traverse_util.flatten_dict(full) | traverse_util.flatten_dict(state.params)
    state = dataclasses.replace(state, params=traverse_util.unflatten_dict(flat))
    return self._filled(state, lambda path: path_name(path) not in trained)

  def _new(self) -> TrainState:
    """Returns a new state; initial values are computed only for variables that are not restored."""
    restored = lambda path: self._place(path) is not None
    unrestored = lambda tree: jax.tree_util.tree_map_with_path(
      lambda path, x: None if restored(path) else x, tree
    )
    new = self.task.new(unrestored, unrestored(self.task.abstract))
    return self._filled(new, restored)

  def _filled(self, state: TrainState, wanted: Callable[[KeyPath], bool]) -> TrainState:
    """Returns `state` with the variables that `wanted` selects read from the other checkpoint."""

    def load(path: KeyPath, like: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
      if not wanted(path):
        return x
      place = self._place(path)
      assert place is not None
      return place[0].load(place[1], like)

    return jax.tree_util.tree_map_with_path(load, self.task.abstract, state)

  def _place(self, path: KeyPath) -> tuple[RestorePlan, str] | None:
    """Returns the plan that reads a variable, and its name there; None if nothing does."""
    name = path_name(path)
    of_reference = name.removeprefix(f'params/{REFERENCE}/')
    if of_reference != name:
      return (
        None if self.reference_plan is None else (self.reference_plan, f'params/{of_reference}')
      )
    return (self.plan, name) if self.plan is not None and name in self.plan else None

  def _saved(self, state: TrainState) -> TrainState:
    """Returns the part of a state that is written to disk."""
    if not self.trainable_only:
      return _without_reference(state)
    flat = traverse_util.flatten_dict(self.task.task.optimizer.split(state.params)[0])
    kept = {k: v for k, v in flat.items() if v is not None}
    return dataclasses.replace(state, params=traverse_util.unflatten_dict(kept))

  def _on_disk(self, state: TrainState) -> dict[str, PyTree]:
    """Returns the fields of a state by name, without FP8's field if that is empty.

    Moments have one gap for a frozen weight, however many arrays it is kept as.
    """
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    weights = tuple(name.removeprefix('params') for name in self.task.quantizations)
    is_gap = lambda x: isinstance(x, dict) and all(v is None for v in x.values())
    one = lambda path, x: None if is_gap(x) and f'/{path_name(path)}'.endswith(weights) else x
    moments = jax.tree_util.tree_map_with_path(one, state.opt_state, is_leaf=is_gap)
    fields |= {'opt_state': moments}
    return {k: v for k, v in fields.items() if k != OVERWRITTEN or jax.tree.leaves(v)}

  def _in_memory(self, fields: dict[str, PyTree]) -> TrainState:
    """Reverses _on_disk."""
    structure = jax.tree.structure(self.task.abstract.opt_state)
    moments = jax.tree.unflatten(structure, jax.tree.leaves(fields['opt_state']))
    return TrainState(**{OVERWRITTEN: {}, **fields, 'opt_state': moments})


def _without_reference(state: TrainState) -> TrainState:
  """Returns a state without the parameters of the reference model."""
  return dataclasses.replace(
    state, params={name: x for name, x in state.params.items() if name != REFERENCE}
  )
