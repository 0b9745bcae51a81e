"""data.jsonl: a run's training data by step, so that its batches can be read again.

A start, and a rollback, write a record of the step, the number of its batch, the batch size, what
identifies the data, and, if they have changed, the values of the experiment, the versions and the
devices, and texts on changes of its code. A save adds the position of streams. Records of steps
that are trained again are dropped.
"""

import json
import logging
import pathlib
from collections.abc import Sequence
from typing import ClassVar

import jax

from paxlite.compilation.versions import versions
from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.run_files import append_line
from paxlite.data.base import Seekable
from paxlite.experiments.identity import identity_of
from paxlite.programs.run import Run
from paxlite.programs.run_folder import code_changes
from paxlite.tracking.writers import drop_later_records, read_records
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_data import TrainData
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer

log = logging.getLogger('paxlite')


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns the callback that writes data.jsonl of a run."""
  changed = code_changes(run) if run.accept_changes else []
  is_first = jax.process_index() == 0
  return [DataRecords(run.folder, trainer.data, identity_of(run.experiment), is_first, changed)]


class DataRecords(Callback):
  """Writes data.jsonl.

  Args:
    folder: The run's job_log_dir.
    data: The training data.
    experiment: What experiment.json holds.
    writes: Whether this process is one that writes.
    changes: Texts on what has changed in the code of the experiment since the last start.
  """

  name: ClassVar[str] = 'data.jsonl'
  rank = -1  # before what may end the run or roll it back

  def __init__(
    self,
    folder: pathlib.Path,
    data: TrainData,
    experiment: JsonObject,
    writes: bool,
    changes: Sequence[str] = (),
  ):
    self._path, self._data, self._writes = folder / self.name, data, writes
    self._experiment = {name: experiment[name] for name in ('experiment', 'values')}
    self._changes, self._has_begun, self._has_failed = list(changes), False, False

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    # after a rollback the data go on where they were, which no checkpoint says
    position = self._position(step, loop) if self._has_begun else self._data.resumed_position
    self._has_begun = True
    if not self._writes:
      return
    record = self._at(step, position) | {'batch_size': self._data.input.batch_size}
    record |= self._data.identity | ({'code_changes': self._changes} if self._changes else {})
    self._changes = []  # a rollback changes none
    try:
      drop_later_records(self._path, step)
      before = list(read_records(self._path))
    except OSError as e:
      self._failed(e)
      return
    for name, now in {'values': self._experiment, 'versions': versions()}.items():
      known = [r[name] for r in before if name in r]
      if known[-1:] != [parsed(json.dumps(now))]:
        record[name] = now
    self._append(record)

  def on_save(self, state: TrainState, step: int, loop: Loop) -> None:
    position = self._position(step, loop)
    if self._writes and position is not None:
      self._append(self._at(step, position))

  def _position(self, step: int, loop: Loop) -> object:
    if not isinstance(self._data.input, Seekable):
      return None
    return loop.metadata(step)()['position']

  def _at(self, step: int, position: object) -> JsonObject:
    found: JsonObject = {'step': step, 'batch': self._data.batch_of(step)}
    return found if position is None else found | {'position': position}

  def _append(self, record: JsonObject) -> None:
    try:
      append_line(self._path, json.dumps(record).encode())
    except OSError as e:
      self._failed(e)

  def _failed(self, error: OSError) -> None:
    if not self._has_failed:
      log.warning('%s is not written: %s', self._path, error.strerror or error)
    self._has_failed = True
