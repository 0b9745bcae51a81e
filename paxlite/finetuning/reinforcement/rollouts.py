"""Rollouts: batches that the newest parameters generate, as in reinforcement learning."""

import abc
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch, one_segment
from paxlite.data.batch_check import check
from paxlite.data.device_batches import to_mesh
from paxlite.losses.metrics import Metrics, Weighted
from paxlite.parallel import partitioning

if TYPE_CHECKING:
  from paxlite.programs.run import Run
  from paxlite.training.callbacks import Callback
  from paxlite.training.train_state import TrainState
  from paxlite.training.trainer import Trainer

_KEPT = 1024  # steps whose states are kept: more than are skipped before a run ends


class RunFiles(NamedTuple):
  """The folder where an input may keep files that a restored run needs.

  Attributes:
    folder: A folder inside the run folder; it may not exist yet.
    writes: Whether this process writes; all processes read.
    oldest_step: Returns the step of the oldest checkpoint; 0 if there is none.
  """

  folder: pathlib.Path
  writes: bool
  oldest_step: Callable[[], int]


class RolloutInput(abc.ABC):
  """An Input that makes each batch with the newest parameters, without reading ahead.

  Subclasses set the attributes and implement the abstract methods. A restored run continues with
  the state in its checkpoint. A rollback after a loss spike restores the parameters but not the
  state.

  Attributes:
    batch_size: Rows in a global batch.
    seq_len: Length T of a row.
    max_token_id: The largest possible token id.
    name: Its name, for messages.
    run_files: Set before training; None without a run.
    measured: Numbers of the last batch, by name, which are added to the metrics of its step.
  """

  batch_size: int
  seq_len: int
  max_token_id: int
  name: str = 'rollouts'
  run_files: RunFiles | None = None
  measured: Mapping[str, float] = MappingProxyType({})

  @abc.abstractmethod
  def next_batch(self, params: PyTree, number: int, rows: slice) -> Batch:
    """Returns rows of the next global batch as host arrays.

    Every process calls this for the same batch. All processes compute what a jitted function
    computes from the parameters; replicate it before a process reads it.

    Args:
      params: The parameters after the previous step, on the mesh. The next step overwrites them.
      number: Number of the batch, from 0: the step plus the steps rolled back.
      rows: The rows of the global batch that belong to this process.
    """

  @abc.abstractmethod
  def state(self) -> JsonObject:
    """Returns, as JSON, what the next batch depends on besides the parameters and its number.

    Called before each batch, so keep it small and do not wait; it must be equal in all processes.
    """

  @abc.abstractmethod
  def restore(self, state: JsonObject) -> None:
    """Continues from a result of `state`."""

  def wait(self, state: JsonObject) -> None:  # noqa: B027  most have nothing to wait for
    """Called before a result of `state` is saved: waits for the files that it needs."""

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the arrays of a global batch from `next_batch`.

    Override it to add arrays [batch_size, …] to ids, labels and weights [batch_size, T]. Without
    segment_ids and segment_pos, each row is one segment, and padding follows its last target.
    """
    like = lambda dtype: jax.ShapeDtypeStruct((self.batch_size, self.seq_len), dtype)
    return {'ids': like('int32'), 'labels': like('int32'), 'weights': like('float32')}

  def drawn_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the arrays of a global batch that is trained on."""
    shapes = self.shapes()
    of_segments = dict.fromkeys(('segment_ids', 'segment_pos'), shapes['ids'])
    return shapes if 'segment_ids' in shapes else shapes | of_segments

  def device_batches(
    self, sharding: NamedSharding, number: int, max_segments: int = 0
  ) -> 'RolloutBatches':
    """Returns the batches on a mesh, of this number and later ones."""
    return RolloutBatches(self, sharding, number, max_segments)

  def resume(self, step: int, state: Json) -> None:
    """Restores the state that the checkpoint of `step` holds; UserError if it holds none."""
    if state is None:
      raise UserError(f'{self.name}: the checkpoint of step {step} has no state of rollouts')
    self.restore(cast(JsonObject, state))

  def callbacks(self) -> list['Callback']:
    """Returns callbacks of a run with this input."""
    return []

  def close(self) -> None:  # noqa: B027  most have nothing to end
    """Called when training has ended, also by an error: ends what still generates."""

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    raise UserError(f'{self.name}: its batches need the newest parameters, which only training has')

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    raise UserError(f'{self.name}: rollouts are for training; evaluate on other data')


class RolloutBatches:
  """Draws global batches on a mesh from a RolloutInput, each when it is needed.

  Args:
    data: The input.
    sharding: The sharding of the batches' arrays [B, T].
    start: The number of the first batch.
    max_segments: The most segments of a packed row, padding included; 0: any number.
  """

  def __init__(
    self, data: RolloutInput, sharding: NamedSharding, start: int, max_segments: int = 0
  ):
    self._data, self._sharding, self._number, self._max_segments = (
      data,
      sharding,
      start,
      max_segments,
    )
    self._rows = partitioning.process_rows(sharding, data.batch_size)
    self._states: dict[int, str] = {}  # before each of the last batches

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of a batch."""
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)
    return {k: like(x) for k, x in self._data.drawn_shapes().items()}

  def draw(self, params: PyTree) -> dict[str, jax.Array]:
    """Returns the next batch; raises UserError if it is wrong."""
    self._states[self._number] = self._state()
    self._states.pop(self._number - _KEPT, None)
    self._data.measured = dict.fromkeys(self._data.measured, 0.0)  # unless it is measured again
    batch = self._data.next_batch(params, self._number, self._rows)
    check(self._data, batch, self._rows.stop - self._rows.start, self._max_segments)
    batch = {k: np.asarray(x) for k, x in batch.items()}
    found, stated = _described(batch), _described(self._data.shapes())
    if found != stated:
      raise UserError(f'the data {self._data.name} yields {found}, but its shapes() says {stated}')
    self._number += 1
    if 'segment_ids' not in batch:
      batch |= one_segment(batch['weights'])
    return to_mesh(batch, self._sharding, self._data.batch_size)

  def state(self, number: int) -> str:
    """Waits for the state of the input before the batch of this number, as the text of its JSON.

    Raises:
      UserError: It is not JSON.
    """
    state = self._states.get(number)
    self._data.wait(parsed(state or self._state()))
    return state or self._state()  # which says now what was waited for

  def _state(self) -> str:
    state = self._data.state()
    try:
      return json.dumps(state, sort_keys=True)
    except (TypeError, ValueError) as e:
      raise UserError(f'{self._data.name}: its state() must be JSON: {e}') from None

  def close(self) -> None:
    self._data.close()


def callbacks(run: 'Run', trainer: 'Trainer') -> list['Callback']:
  """Tells the rollouts of a run where they may keep files; returns the alarm of their engine."""
  data, writes = trainer.data.input, jax.process_index() == 0 or run.own_disks
  if not isinstance(data, RolloutInput):
    return []
  oldest_step = lambda: min(trainer.store.checkpoints.steps(), default=0)
  data.run_files = RunFiles(run.folder / 'rollouts', writes, oldest_step)
  do_step = trainer.do_step

  def measured(*given: Any) -> tuple['TrainState', Metrics]:
    state, metrics = do_step(*given)
    numbers = {f'Metrics/{k}': jnp.float32(x) for k, x in data.measured.items()}
    return state, metrics | {k: Weighted(x, jnp.ones(())) for k, x in numbers.items()}

  trainer.do_step = measured
  return data.callbacks()


def _described(arrays: Mapping[str, Any]) -> str:
  """Returns the names, dtypes and shapes without the rows, such as 'ids int32[16], …'."""
  return ', '.join(f'{k} {x.dtype.name}{list(x.shape[1:])}' for k, x in sorted(arrays.items()))
