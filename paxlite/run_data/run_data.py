"""The batches of a run, read again from the data, with their origins.

Nothing here needs an accelerator or the parameters. A step's batch is computed from its number.
Streams are read from the nearest position that the run has kept: see run_data.data_records.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator

import fiddle as fdl
import numpy as np

from paxlite.config.experiment_file import EXPERIMENT, renewed
from paxlite.config.placed_paths import placed
from paxlite.core.errors import AbsentError, UserError, line_of
from paxlite.core.json_text import JsonObject
from paxlite.data.base import Batch, Input, OnPolicyInput, Seekable
from paxlite.data.fingerprints import change, identity
from paxlite.data.tokenizer import Tokenizer, open_tokenizer
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import run_values
from paxlite.experiments.registry import find_known
from paxlite.experiments.rows import Rows
from paxlite.files.json_files import read_object
from paxlite.files.schemes import is_address, records_of
from paxlite.programs import kept_tokenizer
from paxlite.programs.launch import build_experiment
from paxlite.run_data.data_records import DataRecords
from paxlite.run_data.origins import traced
from paxlite.tracking.writers import EpisodeRecords, TrainRecords, read_records

_IDENTITY = 'fingerprint', 'tokens', 'held_out', 'left_out'  # what fingerprints.identity returns


@dataclasses.dataclass(frozen=True)
class Stretch:
  """Consecutive steps of a run with the same data."""

  step: int  # the step after which it begins
  batch: int  # the number of the first batch
  batch_size: int | None  # rows of a global batch; None: that of the experiment
  values: JsonObject  # what experiment.json held
  identity: JsonObject  # what identifies the data; {}: not known

  def continues(self, before: 'Stretch') -> bool:
    """Whether another stretch and this one are one."""
    same = dataclasses.replace(before, step=self.step, batch=before.batch + self.step - before.step)
    return same == self


@dataclasses.dataclass(frozen=True)
class Position:
  """The positions of a run's streams before a batch."""

  step: int
  batch: int
  position: list[list[int]]


class RunData:
  """The training data of a run; raises UserError if there is no run, or its records cannot be read.

  Args:
    place: The run's job_log_dir; it may be in an object store.
    vocab: A tokenizer; '': that of the run.

  Attributes:
    place: The same.
    folder: The folder of its records on this machine.
  """

  def __init__(self, place: str, vocab: str = ''):
    self.place, self._vocab = place, vocab
    try:
      self.folder = records_of(place)
      found = run_values(self.folder)
    except AbsentError:
      found = None
    except OSError as e:
      raise UserError(f'the run {place} cannot be read: {e.strerror or e}') from None
    if found is None:
      raise UserError(f'{place} is not the folder of a run: it holds no {EXPERIMENT}')
    self._values = found
    self._stretches, self._first = self._read_stretches()
    self._experiments: dict[int, Experiment] = {}
    self._inputs: dict[int, Input] = {}
    self._built: list[tuple[fdl.Config, Input]] = []

  @functools.cached_property
  def steps_done(self) -> int:
    """The last step known to be complete."""
    records = (*read_records(self.folder / TrainRecords.name), *self._records)
    return max([0, *(r['step'] for r in records), *self._saved])

  @functools.cached_property
  def losses(self) -> dict[int, float]:
    """The recorded losses that are numbers, by step."""
    found = ((r['step'], r.get('loss')) for r in read_records(self.folder / TrainRecords.name))
    return {step: float(x) for step, x in found if isinstance(x, int | float)}

  @property
  def experiment(self) -> Experiment:
    """The experiment of the last step."""
    return self._experiment(len(self._stretches) - 1)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the data; None if the run names none, as on random tokens."""
    e = self.experiment
    path = (
      self._vocab or e.tokenizer_path or e.weights.tokenizer or os.environ.get('VOCAB_PATH', '')
    )
    return open_tokenizer(path) if path else None

  def check_step(self, step: int) -> None:
    """Raises UserError if the run has no such step."""
    done = self.steps_done
    if not 1 <= step <= done:
      raise UserError(
        f'--step={step}: {self.place} trained steps 1 to {done:,}'
        if done
        else f'{self.place} has done no step yet'
      )

  def same_documents(self, step: int, other: int) -> bool:
    """Returns whether the documents of two steps have the same numbers, if some are left out."""
    return self._plain_config(self._number(step)) == self._plain_config(self._number(other))

  @property
  def files_left_out(self) -> set[str]:
    """The files that LEAVE_OUT has named so far."""
    values = [self._values, *(stretch.values for stretch in self._stretches)]
    named = {str(v['values']['LEAVE_OUT']) for v in values if v['values'].get('LEAVE_OUT')}
    folder = self._values['started_in']
    return {str(placed(type(self.experiment), 'LEAVE_OUT', name, folder)) for name in named}

  @property
  def first_steps(self) -> list[int]:
    """The first step of each start or rollback that is known."""
    return [stretch.step + 1 for stretch in self._stretches if stretch.step < self.steps_done]

  def data_of(self, step: int) -> Input:
    """Returns the input of a step, without tracing its batches."""
    return self._input(self._number(step))

  def batch_number(self, step: int) -> int:
    """Returns the number of the batch of a step."""
    stretch = self._stretches[self._number(step)]
    return stretch.batch + step - 1 - stretch.step

  def episodes(self, step: int) -> list[JsonObject]:
    """Returns the recorded episodes of a step; [] if there are none."""
    self.check_step(step)
    number = self.batch_number(step)
    found = read_records(self.folder / EpisodeRecords.name)
    return [r for r in found if isinstance(r.get('batches'), list) and number in r['batches']]

  def batch(self, step: int) -> Batch:
    """Returns the global batch of a step, with origins."""
    self.check_step(step)
    _, batch = next(self.batches(step, step))
    return batch

  def batches(self, first: int, last: int) -> Iterator[tuple[int, Batch]]:
    """Yields the steps from `first` to `last` with their global batches.

    Raises UserError if the data are gone, or are not what the run was trained on.
    """
    step = first
    while step <= last:
      number = self._number(step)
      after = self._stretches[number + 1].step if number + 1 < len(self._stretches) else last
      until = min(last, after)
      for batch in self._read(number, step, until):
        yield step, batch
        step += 1

  def _read(self, number: int, first: int, last: int) -> Iterator[Batch]:
    data, begin = traced(self._input(number)), self.batch_number(first)
    start = begin
    if isinstance(data, Seekable):
      start, position = self._position(number, begin)
      if position is not None:
        data.seek(start, np.array(position, np.int64))
    found = data.train_batches(start, slice(0, data.batch_size))
    try:
      for at in range(start, begin + last - first + 1):
        with self._reading():
          batch = next(found)
        if at >= begin:
          yield batch
    finally:
      if hasattr(found, 'close'):
        found.close()

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    """Turns errors of reading the data into UserErrors."""
    try:
      yield
    except OSError as e:
      # Fiddle's errors repeat the config below the first line
      what = f'{e.filename}: {e.strerror}' if e.filename else line_of(e)
      raise UserError(
        f'the data of {self.place} cannot be read ({what}): put it back, or permit reading it'
      ) from None

  def _position(self, number: int, batch: int) -> tuple[int, list[list[int]] | None]:
    """Returns the nearest kept position before a batch, and the number of the batch there."""
    stretch = self._stretches[number]
    after = self._stretches[number + 1].step if number + 1 < len(self._stretches) else None
    known = [
      p
      for p in self._positions
      if stretch.step <= p.step
      and (after is None or p.step <= after)
      and stretch.batch <= p.batch <= batch
    ]
    if known:
      best = max(known, key=lambda p: p.batch)
      return best.batch, best.position
    if stretch.batch == 0:
      return 0, None
    raise UserError(
      f'{self.place} kept no position of its streams at step {stretch.step}, which later batches '
      'need'
    )

  def _number(self, step: int) -> int:
    """Returns the number of the stretch of a step."""
    if step <= self._unknown_left_out:
      raise UserError(
        f'{self.place} leaves records out (LEAVE_OUT), but without the {DataRecords.name} of its '
        f'first start the step (up to {self._unknown_left_out:,}) where this began is unknown'
      )
    if step <= self._first and _continued_another(self._stretches[0].values):
      raise UserError(
        f'{self.place} continued the state of another run (CHECKPOINT_RESTORE_STATE) from step '
        f'{self._first:,}, and these steps belong to that run: ask for its data'
      )
    if step <= self._first:
      raise UserError(
        f'the batches up to step {self._first:,} are unknown: {self.place} rolled back before it '
        f'kept {DataRecords.name}'
      )
    numbers = [i for i, stretch in enumerate(self._stretches) if stretch.step < step]
    return numbers[-1] if numbers else 0

  @functools.cached_property
  def _unknown_left_out(self) -> int:
    """The last step of which it is not known which records were left out; 0: it is known of all."""
    starts = [r for r in self._records if isinstance(r.get('batch_size'), int)]
    if starts:  # the file may have been lost, and begun again
      return starts[0]['step'] if starts[0].get('left_out') else 0
    known = [metadata.get('left_out') for metadata in self._saved.values()]
    is_asked = self._values['values'].get('LEAVE_OUT')
    return self.steps_done if is_asked or any(known) else 0

  def _experiment(self, number: int) -> Experiment:
    if number not in self._experiments:
      self._experiments[number] = self._build(self._stretches[number])
    return self._experiments[number]

  def _build(self, stretch: Stretch) -> Experiment:
    name = stretch.values['experiment']
    find_known(name)  # a name in a file must not cause the import of a module
    values, is_of = stretch.values, lambda x: x['values'].get(kept_tokenizer.NAME) or ''
    is_gone = not is_address(is_of(values)) and not os.path.exists(is_of(values))
    # the copy is that of the last start; if it is another one, the tokens differ from those known
    if is_gone or is_of(values) == is_of(self._values):
      values = kept_tokenizer.to_read(values, self.folder)
    e = build_experiment(name, [], {}, values)
    if stretch.batch_size and e.batch_size != stretch.batch_size:
      return e.replaced(PERCORE_BATCH_SIZE=stretch.batch_size / e.num_devices)
    return e

  def _input(self, number: int) -> Input:
    if number not in self._inputs:
      self._inputs[number] = self._open(number)
    return self._inputs[number]

  def plain_data(self) -> Input:
    """Returns a new input with the data of the last step, which leaves nothing out."""
    with self._reading():
      return fdl.build(self._plain_config(len(self._stretches) - 1))

  def _plain_config(self, number: int) -> fdl.Config:
    e = self._experiment(number)
    return _config(e.replaced(LEAVE_OUT='') if isinstance(e, Rows) else e)

  def _open(self, number: int) -> Input:
    e, stretch = self._experiment(number), self._stretches[number]
    config = _config(e)
    same = [data for other, data in self._built if other == config]
    with self._reading():
      data = same[0] if same else fdl.build(config)
      now = identity(data)
    if not same:  # other values of the experiment, as MAX_STEPS, change no data
      self._built.append((config, data))
    if isinstance(data, OnPolicyInput):
      raise UserError(
        f'{self.place} was trained on generated answers and keeps KEPT_EPISODES per batch in '
        f'{EpisodeRecords.name}: it has none of this step'
      )
    why = change(now, stretch.identity)
    if not why and stretch.identity and now.get('left_out') != stretch.identity.get('left_out'):
      why = 'the file that LEAVE_OUT names has changed since'
    if why:
      raise UserError(f'{data.name} is not the training data of {self.place}: {why}')
    return data

  @functools.cached_property
  def _positions(self) -> list[Position]:
    records = list(self._records)
    for metadata in self._saved.values():
      at = metadata['step'] + metadata.get('skipped_batches', 0)
      records.append({**metadata, 'batch': at})
    return [
      Position(r['step'], r['batch'], r['position'])
      for r in records
      if r.get('position') and isinstance(r.get('batch'), int)
    ]

  @functools.cached_property
  def _records(self) -> list[JsonObject]:
    """The records of data.jsonl; [] if there is no such file."""
    path = self.folder / DataRecords.name
    try:
      path.open('rb').close()
    except FileNotFoundError:
      return []
    except OSError as e:
      raise UserError(f'{path} cannot be read: {e.strerror or e}') from None
    return list(read_records(path))

  @functools.cached_property
  def _saved(self) -> dict[int, JsonObject]:
    """The metadata of the checkpoints that are here, by step."""
    found = {}
    for path in (self.folder / 'checkpoints').glob('*/data/metadata'):
      step = re.search(r'(\d+)$', path.parents[1].name)
      if step and path.parents[1].name.count('_') <= 1:
        found[int(step[1])] = {'step': int(step[1])} | read_object(path)
    return found

  def _read_stretches(self) -> tuple[list[Stretch], int]:
    """Returns the stretches, and the last step before them with an unknown batch."""
    found: list[Stretch] = []
    values = self._values
    for record in self._records:
      if isinstance(record.get('values'), dict):
        values = renewed({'started_in': self._values['started_in'], **record['values']})
      if not isinstance(record.get('batch_size'), int):
        continue
      known = {k: record[k] for k in _IDENTITY if k in record}
      new = Stretch(record['step'], record['batch'], record['batch_size'], values, known)
      while found and found[-1].step >= new.step:
        found.pop()
      if not found or not new.continues(found[-1]):
        found.append(new)
    if not found:
      newest = self._saved[max(self._saved)] if self._saved else {}
      skipped = newest.get('skipped_batches', 0)
      known = {k: newest[k] for k in _IDENTITY if k in newest}
      step = newest['step'] if skipped else 0
      return [Stretch(step, step + skipped, newest.get('batch_size'), values, known)], step
    first = found[0]
    if _continued_another(first.values):
      return found, first.step
    if first.step and first.batch == first.step:  # it began before there was such a file
      found[0] = dataclasses.replace(first, step=0, batch=0)
      return found, 0
    return found, first.step


def _continued_another(values: JsonObject) -> bool:
  """Whether a run with these values began with the state and the step of another run."""
  stated = values['values']
  return bool(stated.get('CHECKPOINT_RESTORE_PATH') and stated.get('CHECKPOINT_RESTORE_STATE'))


def _config(e: Experiment) -> fdl.Config:
  """Returns the config of the training data, without the weights that fine-tuning asks for."""
  examples = e.example_input() if isinstance(e, Rows) else None
  return examples or e.train_input()
