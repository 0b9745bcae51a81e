"""Where a train state comes from, and what of it is saved."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.checkpointing.checkpoints import Checkpoints, shapes_of
from paxlite.checkpointing.restore import OVERWRITTEN, Plan, Restore
from paxlite.checkpointing.source import Source, find_source
from paxlite.core.errors import UserError
from paxlite.core.json_files import read_object
from paxlite.core.trees import path_name
from paxlite.parallel import partitioning
from paxlite.runtime import compiler
from paxlite.training.task import Task
from paxlite.training.train_state import TrainState


@dataclasses.dataclass
class States:
  """Makes, restores and saves the states of a run.

  Attributes:
    task: Tells what a state is.
    mesh: Where it lies.
    rules: Logical axes to mesh axes.
    checkpoints: The run's own.
    seed: Of the initial values.
    batch_size: Rows of a global batch: a checkpoint of another size is refused.
    restore: Another checkpoint that a new run starts from.
    trainable_only: Saves the parameters that are trained and no others: the frozen ones come from
      `restore` each time.
    start_over: Whether a run may begin again where its checkpoints are all damaged.
  """

  task: Task
  mesh: Mesh
  rules: partitioning.Rules
  checkpoints: Checkpoints
  seed: int
  batch_size: int
  restore: Restore | None = None
  trainable_only: bool = False
  start_over: bool = False

  @functools.cached_property
  def abstract(self) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    boxed = jax.eval_shape(self.task.init, jax.random.key(0))
    return partitioning.sharded_shapes(boxed, self.mesh, self.rules)

  @functools.cached_property
  def plan(self) -> Plan | None:
    """Where variables come from that the run's own checkpoints, if any, do not hold.

    Raises:
      UserError: the other checkpoint does not fit.
    """
    if self.restore is None or (self.checkpoints.steps() and not self.trainable_only):
      return None
    step = self.checkpoints.latest_good_step() if self.trainable_only else None
    frozen = None if step is None else Source(self.checkpoints.folder(step), pathlib.Path()).frozen
    return Plan(self.restore, self.abstract, find_source(self.restore.path, frozen=frozen))

  def initial(self) -> tuple[TrainState, int]:
    """The state of the run's last good checkpoint, or a new one; and its step.

    Raises:
      UserError: the checkpoint does not fit; or there are some and none is good, and nobody said
        that the run may start over.
    """
    if self.trainable_only:
      self.plan  # noqa: B018 - checks the same checkpoints
    found = self.checkpoints.restore_latest(self.restored)
    if found is None:
      self.checkpoints.start_over(self.start_over)
      if self.plan is None:
        del self.plan  # damaged checkpoints were there when it was made
      state = self._new()
      return state, int(state.step)
    step, (state, data) = found
    if data['batch_size'] != self.batch_size:
      raise UserError(
        f'the checkpoint of step {step} was trained with a global batch of {data["batch_size"]} '
        f'and this run has {self.batch_size}: the data would be read twice or left out. '
        'Choose PERCORE_BATCH_SIZE so that PERCORE_BATCH_SIZE × devices is the same'
      )
    return state, step

  def last(self) -> tuple[TrainState, int]:
    """What to evaluate, and its step: the last good checkpoint, or restored parameters.

    Raises:
      UserError: there are none, or they do not fit.
    """
    while (step := self.checkpoints.latest_good_step()) is not None:
      try:
        return self.restored(step)[0], step
      except (ValueError, OSError):
        if step in self.checkpoints.steps():
          raise
        self.checkpoints.close()  # the run that is training has removed it meanwhile
    self.checkpoints.start_over(accepted=False)
    if self.plan is None:
      raise UserError('the run holds no good checkpoint to evaluate: train first')
    return self._new(), 0

  def save(self, step: int, state: TrainState, notes: Mapping[str, Any] | None = None) -> None:
    """Saves in the background, with what else to note of the step, as JSON has it."""
    data: dict[str, Any] = {'step': step, 'batch_size': self.batch_size, **(notes or {})}
    if self.trainable_only and self.plan is not None:
      data['frozen'] = self.plan.source.fingerprint
    self.checkpoints.save(step, _on_disk(self._saved(state)), data)

  def notes(self, step: int) -> dict[str, Any]:
    """What was noted when a step was saved; empty where it is not one of the run's own."""
    path = self.checkpoints.folder(step) / 'data' / 'metadata'
    return read_object(path) if path.is_file() else {}

  def _new(self) -> TrainState:
    """A new state, made sharded: it never exists whole on one device.

    Initial values are computed for what is not restored, and for nothing else.
    """
    if self.plan is None:
      return self._make(lambda state: state, self.abstract)
    plan = self.plan
    restored = lambda path: path_name(path) in plan
    unrestored = lambda tree: jax.tree_util.tree_map_with_path(
      lambda path, x: None if restored(path) else x, tree
    )
    return self._filled(self._make(unrestored, unrestored(self.abstract)), restored)

  def _make(self, part: Callable[[TrainState], Any], like: Any) -> Any:
    """`part` of a new state, computed alone and sharded as `like` is."""
    init = jax.jit(
      lambda rng: part(meta.unbox(self.task.init(rng))),
      out_shardings=jax.tree.map(lambda x: x.sharding, like),
      compiler_options=compiler.initial_values_options(self.mesh.devices.flat[0].platform),
    )
    with self.task.compiling(self.mesh, self.rules):
      return init(jax.random.key(self.seed))

  def _filled(self, state: TrainState, wanted: Callable[[Any], bool]) -> TrainState:
    """`state` with what is None and wanted read from the other checkpoint."""
    assert self.plan is not None
    plan = self.plan
    load = lambda path, like, x: plan.load(path_name(path), like) if wanted(path) else x
    return jax.tree_util.tree_map_with_path(load, self.abstract, state)

  def restored(self, step: int) -> tuple[TrainState, dict[str, Any]]:
    """The state of one of the run's checkpoints, and its notes."""
    wanted = self._saved(self.abstract)
    # what another backend left is of no use to this one, which starts its own anew
    prefix = f'{OVERWRITTEN}/'
    held = {k: v for k, v in self.checkpoints.shapes(step).items() if k.startswith(prefix)}
    changed = held != shapes_of({OVERWRITTEN: wanted.overwritten})
    if changed:
      wanted = dataclasses.replace(wanted, overwritten={})
    surplus = prefix if changed else ''
    found, data = self.checkpoints.restore(step, _on_disk(wanted), surplus)
    state = TrainState(**{OVERWRITTEN: {}, **found})
    if changed:
      new = self._make(lambda state: state.overwritten, self.abstract.overwritten)
      state = dataclasses.replace(state, overwritten=new)
    if not self.trainable_only:
      return state, data
    trained = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(self._saved(state))}
    full = jax.tree_util.tree_map(lambda _: None, self.abstract.params)
    flat = traverse_util.flatten_dict(full) | traverse_util.flatten_dict(state.params)
    state = dataclasses.replace(state, params=traverse_util.unflatten_dict(flat))
    return self._filled(state, lambda path: path_name(path) not in trained), data

  def _saved(self, state: TrainState) -> TrainState:
    """The part of a state that goes to disk."""
    if not self.trainable_only:
      return state
    flat = traverse_util.flatten_dict(self.task.optimizer.split(state.params)[0])
    kept = {k: v for k, v in flat.items() if v is not None}
    return dataclasses.replace(state, params=traverse_util.unflatten_dict(kept))


def _on_disk(state: TrainState) -> dict[str, Any]:
  """The fields of a state by name; what is empty leaves no trace on disk."""
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  return {k: v for k, v in fields.items() if k != OVERWRITTEN or jax.tree.leaves(v)}
