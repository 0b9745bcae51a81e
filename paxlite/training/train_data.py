"""Assigns batches of the training data to the steps of a run, and resumes reading the data."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.data.base import Input, OnPolicyInput, Seekable, place
from paxlite.data.device_batches import DeviceBatches, StepBatches
from paxlite.data.fingerprints import (
  change,
  changes_of_evaluations,
  identity,
  is_unknown,
  newly_left_out,
)
from paxlite.data.positions import merged
from paxlite.parallel.partitioning import process_rows
from paxlite.processes.agreement import compare
from paxlite.processes.process_messages import gathered

log = logging.getLogger('paxlite')


class TrainData:
  """The training input, and its position, which is stored in the metadata of checkpoints.

  Step s trains on batch s. After a rollback the batches up to the loss spike are not used again,
  and all later steps train on correspondingly later batches.

  Attributes:
    skipped_batches: How many batches come before a step that no step is trained on.
    resumed_position: The position in the checkpoint that the run continues from; None: it has none.

  Args:
    input: The training input.
    accept_changes: Whether a run may continue although its data has changed.
    max_segments: The most segments of a packed row, padding included; 0: any number.
    evaluated: The inputs of evaluations, by name.
    former: The flags that name the files of the last start, if they are others now.
    encoding: Names what is known to have changed of how records are encoded.
  """

  def __init__(
    self,
    input: Input,
    accept_changes: bool = False,
    max_segments: int = 0,
    evaluated: Mapping[str, Input] | None = None,
    former: str = '',
    encoding: Callable[[], Sequence[str]] = list,
  ):
    self.input = input
    self._evaluated = evaluated or {}
    self._accept_changes, self._encoding = accept_changes, encoding
    self._max_segments = max_segments
    self._former = f'. {former} names the files of before' if former else ''
    self.skipped_batches = 0
    self.resumed_position: Json = None
    self._resumed: int | None = None
    self._rollouts: Any = None

  def batches(self, step: int, sharding: NamedSharding) -> StepBatches:
    """Returns the batches of `step` and of all later steps; the caller must close them."""
    number, most = self.batch_of(step), self._max_segments
    if isinstance(self.input, OnPolicyInput):
      self._rollouts = self.input.device_batches(sharding, number, most)
      return cast(StepBatches, self._rollouts)
    return DeviceBatches(self.input, sharding, number, most)

  def redrawn(self, step: int, sharding: NamedSharding) -> Mapping[str, np.ndarray] | None:
    """Returns this process's rows of the batch that trains step `step`, from 1, drawn again.

    None where the data has a position, or is made by the model, so that it cannot be drawn twice.
    """
    if isinstance(self.input, Seekable | OnPolicyInput):
      return None
    rows = process_rows(sharding, self.input.batch_size)
    return next(iter(self.input.train_batches(self.batch_of(step - 1), rows)))

  def rows(self, step: int) -> str:
    """Describes the rows of a step's batch, for messages."""
    return place(self.input, self.batch_of(step))

  def skip(self, batches: int) -> None:
    """Makes all later steps train on batches that come `batches` later in the data."""
    self.skipped_batches += batches

  def metadata(self, step: int) -> Callable[[], JsonObject]:
    """Begins to collect the metadata from which reading resumes at the batch of `step`.

    Every process must call this.

    Returns:
      A function that waits for the other processes, and returns the metadata.
    """
    metadata: JsonObject = {}
    if self.skipped_batches:
      metadata['skipped_batches'] = self.skipped_batches
    metadata |= self._known
    if self._rollouts is not None:
      state = self._rollouts.state(self.batch_of(step))
      compare({f'the state() of {self.input.name}': state})
      return lambda: metadata | {'rollouts': parsed(state)}
    if not isinstance(self.input, Seekable):
      return lambda: metadata
    known = np.ascontiguousarray(self.input.position(self.batch_of(step)), np.int64)
    found = gathered(known.view(np.int32))  # JAX truncates int64
    return lambda: metadata | {'position': merged(found().view(np.int64)).tolist()}

  def resume(self, step: int, metadata: Mapping[str, Json]) -> None:
    """Moves the data to the batch of `step`; a second call for the same step does nothing.

    Args:
      step: The step that the run continues from.
      metadata: The metadata of its checkpoint.

    Raises:
      UserError: The data cannot be read from there, or is not the data the run was trained on.
    """
    if self._resumed == step:
      return
    self._resumed = step
    self.resumed_position = metadata.get('position')
    self.skipped_batches = int(metadata.get('skipped_batches', 0))
    if isinstance(self.input, OnPolicyInput) and metadata:
      self.input.resume(step, metadata.get('rollouts'))
    if isinstance(self.input, Seekable) and step:
      if 'position' not in metadata:
        raise UserError(
          f'{self.input.name}: the checkpoint of step {step} has no position in it; start again '
          'with another folder'
        )
      try:
        self.input.seek(self.batch_of(step), np.array(metadata['position'], np.int64))
      except UserError as e:
        raise UserError(f'{e}{self._former}') from None
    if step and jax.process_index() == 0:
      self._warn(step, metadata)
    why = change(self._known, metadata, self._encoding)
    if why:
      changed = f'{self.input.name} is not the data of the checkpoint of step {step}'
      if not self._accept_changes:
        raise UserError(
          f'{changed}: {why}. Put it back, choose another folder, or continue with the '
          f'change: --accept_changes{self._former}'
        )
      if jax.process_index() == 0:
        log.warning('%s; the run continues with it, because of --accept_changes', changed)

  def _warn(self, step: int, metadata: Mapping[str, Json]) -> None:
    """Warns of changes since a checkpoint with which a run may continue."""
    if count := newly_left_out(self.identity, metadata):
      records = f'{count:,} more record{"s are" if count > 1 else " is"} left out'
      log.warning('from step %d on, %s (LEAVE_OUT)', step + 1, records)
    if is_unknown(self.identity, metadata):
      log.warning(
        '%s: the version that saved step %d recorded only names and sizes, so later changes of '
        'the contents are unknown',
        self.input.name,
        step,
      )
    for line in changes_of_evaluations(self._known['evaluated'], metadata):
      log.warning('%s', line)

  def batch_of(self, step: int) -> int:
    """Returns the number of the batch that the step after `step` is trained on."""
    return step + self.skipped_batches

  @functools.cached_property
  def identity(self) -> JsonObject:
    """What identifies the data; read before the first batch, as files may vanish later."""
    return identity(self.input)

  @functools.cached_property
  def _known(self) -> JsonObject:
    """The same with what identifies the inputs of evaluations, as checkpoints hold it."""
    evaluated = {name: identity(data) for name, data in self._evaluated.items()}
    return {**self.identity, 'evaluated': evaluated}
