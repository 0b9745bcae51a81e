"""Where a train state comes from, and what of it is saved."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from flax import traverse_util
from flax.linen import meta
from jax.sharding import Mesh

from paxlite import partitioning
from paxlite.checkpoints import Checkpoints, shapes_of
from paxlite.errors import UserError
from paxlite.inputs.files import read_object
from paxlite.optimizers import path_name
from paxlite.restoring import OVERWRITTEN, Plan, Restore, Source, find_source
from paxlite.task import Task
from paxlite.train_state import TrainState


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
  """

  task: Task
  mesh: Mesh
  rules: partitioning.Rules
  checkpoints: Checkpoints
  seed: int
  batch_size: int
  restore: Restore | None = None
  trainable_only: bool = False

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
    return Plan(self.restore, self.abstract, find_source(self.restore.path, fingerprint=frozen))

  def initial(self) -> tuple[TrainState, int]:
    """The state of the run's last good checkpoint, or a new one; and its step.

    Raises:
      UserError: the checkpoint does not fit.
    """
    step = self.checkpoints.latest_good_step()
    if step is None:
      state = self._new()
      return state, int(state.step)
    state, data = self._restored(step)
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
    step = self.checkpoints.latest_good_step()
    if step is not None:
      return self._restored(step)[0], step
    if self.plan is None:
      raise UserError('the run holds no good checkpoint to evaluate: train first')
    return self._new(), 0

  def save(self, step: int, state: TrainState, positions: list[Any] | None = None) -> None:
    """Saves in the background; `positions` of the input, one a process, where a step has none."""
    data: dict[str, Any] = {'step': step, 'batch_size': self.batch_size}
    if positions is not None:
      data['positions'] = positions
    if self.trainable_only and self.plan is not None:
      data['frozen'] = self.plan.source.fingerprint
    self.checkpoints.save(step, _on_disk(self._saved(state)), data)

  def positions(self, step: int) -> list[Any] | None:
    """The positions that were saved with a step, or None."""
    path = self.checkpoints.folder(step) / 'data' / 'metadata'
    return read_object(path).get('positions') if path.is_file() else None

  def _new(self) -> TrainState:
    """A new state, made sharded: it never exists whole on one device.

    Initial values are computed for what is not restored, and for nothing else.
    """
    key = jax.random.key(self.seed)
    if self.plan is None:
      shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
      init = jax.jit(lambda rng: meta.unbox(self.task.init(rng)), out_shardings=shardings)
      with self.task.compiling(self.mesh, self.rules):
        return init(key)
    plan = self.plan
    restored = lambda path: path_name(path) in plan
    unrestored = lambda tree: jax.tree_util.tree_map_with_path(
      lambda path, x: None if restored(path) else x, tree
    )
    shardings = jax.tree.map(lambda x: x.sharding, unrestored(self.abstract))
    init = jax.jit(lambda rng: unrestored(meta.unbox(self.task.init(rng))), out_shardings=shardings)
    with self.task.compiling(self.mesh, self.rules):
      state = init(key)
    return self._filled(state, restored)

  def _filled(self, state: TrainState, wanted: Callable[[Any], bool]) -> TrainState:
    """`state` with what is None and wanted read from the other checkpoint."""
    assert self.plan is not None
    plan = self.plan
    load = lambda path, like, x: plan.load(path_name(path), like) if wanted(path) else x
    return jax.tree_util.tree_map_with_path(load, self.abstract, state)

  def _restored(self, step: int) -> tuple[TrainState, dict[str, Any]]:
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
      state = dataclasses.replace(state, overwritten=self._new_overwritten())
    if not self.trainable_only:
      return state, data
    trained = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(self._saved(state))}
    full = jax.tree_util.tree_map(lambda _: None, self.abstract.params)
    flat = traverse_util.flatten_dict(full) | traverse_util.flatten_dict(state.params)
    state = dataclasses.replace(state, params=traverse_util.unflatten_dict(flat))
    return self._filled(state, lambda path: path_name(path) not in trained), data

  def _new_overwritten(self) -> Any:
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract.overwritten)
    init = lambda rng: meta.unbox(self.task.init(rng)).overwritten
    with self.task.compiling(self.mesh, self.rules):
      return jax.jit(init, out_shardings=shardings)(jax.random.key(self.seed))

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
