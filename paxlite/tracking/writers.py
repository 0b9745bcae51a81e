"""Writers of a run's metrics: files, TensorBoard, the terminal, and trackers."""

import collections
import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from paxlite.cli import live_line
from paxlite.cli.terminal import say
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.core.run_files import append_line, check_place, open_file
from paxlite.files.set_aside import set_aside

_SECONDS = 10.0  # between two lines that stay on a terminal
_MOST_KEPT = 100_000  # records in memory while a file cannot be written; older ones are lost


class Writer:
  """Receives the metrics of a run; subclasses override the methods that they need.

  If a writer raises one of its `failures`, the run continues; that record may be lost.
  """

  name = ''  # what a message calls it, such as the name of a file
  failures: tuple[type[Exception], ...] = (OSError,)  # do not stop the run

  def start(self) -> None:
    """Starts the writer; raises UserError if it cannot start."""

  def rewind(self, step: int, evaluated: int) -> None:
    """Drops the records of later steps, which the run will repeat.

    Args:
      step: The last step that is not repeated.
      evaluated: The last step whose evaluation is not repeated.
    """

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    """Receives the record of a training step.

    Args:
      step: Number of steps done, including this one.
      record: loss, lr, grad_norm, skipped_steps (up to this one), tokens_per_second, step_seconds,
        model_tflops, mfu; unknown values are None.
      scalars: All metrics of the step by their TensorBoard names.
    """

  def progress(self, step: int, record: Mapping[str, Json]) -> None:
    """Receives a step between two records; arguments as for `train`."""

  def evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
    """Receives the metrics of the evaluation input `name`."""

  def samples(self, step: int, generated: Mapping[str, str], verb: str = 'continuing') -> None:
    """Receives generated texts by prompt; `verb` says how, as 'continuing'."""

  def write_kept(self) -> None:
    """Writes records that could not be written before, if any; may be called after `close`."""

  def close(self) -> None:
    """Writes what is left and ends."""


@contextlib.contextmanager
def started(writers: Sequence[Writer]) -> Iterator[None]:
  """Starts trackers and closes them at the end of the block.

  Raises UserError if a tracker cannot start.
  """
  with contextlib.ExitStack() as stack:
    for writer in writers:
      writer.start()
      stack.callback(writer.close)
    yield


class _Records(Writer):
  """A file of records, a JSON object each.

  Records that cannot be written, as on a full disk, are kept in memory and written before later
  ones, or at the next step that is recorded. So the file has all records up to a checkpoint that
  could be saved after them.

  Args:
    folder: The run's job_log_dir.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder / self.name
    self._kept = collections.deque[JsonObject](maxlen=_MOST_KEPT)
    self._rewind_to: int | None = None  # records of later steps are to be dropped from the file

  def rewind(self, step: int, evaluated: int) -> None:
    last = self._rewind_to = self._last(step, evaluated)
    kept = [record for record in self._kept if record['step'] <= last]
    self._kept.clear()
    self._kept += kept
    self._write()

  def _last(self, step: int, evaluated: int) -> int:
    """Returns the last step whose records stay, of the arguments of `rewind`."""
    return evaluated

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    self._write()

  def write_kept(self) -> None:
    self._write()

  def close(self) -> None:
    self._write()

  def _write(self, *records: JsonObject) -> None:
    """Appends records, after what could not be done to the file before."""
    self._kept += records
    if self._rewind_to is not None:
      drop_later_records(self._path, self._rewind_to)
      self._rewind_to = None
    while self._kept:
      _append(self._path, self._kept[0])
      self._kept.popleft()


class TrainRecords(_Records):
  """metrics.jsonl: one JSON object for each recorded training step."""

  name = 'metrics.jsonl'

  def _last(self, step: int, evaluated: int) -> int:
    return step

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    self._write({'step': step, **record})


class EvalRecords(_Records):
  """eval_metrics.jsonl: one JSON object for each evaluation of an input."""

  name = 'eval_metrics.jsonl'

  def evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
    self._write({'step': step, 'input': name, **metrics})


class SampleRecords(_Records):
  """samples.jsonl: one JSON object for each text that the model has generated."""

  name = 'samples.jsonl'

  def samples(self, step: int, generated: Mapping[str, str], verb: str = 'continuing') -> None:
    how: JsonObject = {} if verb == 'continuing' else {'how': verb}
    self._write(
      *({'step': step, 'prompt': prompt, 'text': text, **how} for prompt, text in generated.items())
    )


class EpisodeRecords(_Records):
  """episodes.jsonl: one JSON object for each episode that is kept of a batch of rollouts."""

  name = 'episodes.jsonl'

  def episodes(self, records: Sequence[JsonObject]) -> None:
    self._write(*records)


class TerminalLines(Writer):
  """Lines on the terminal; the last one changes with each step.

  Args:
    max_steps: The last step, from which the remaining time is computed.
    ahead: Returns what comes next after a step, such as 'eval at 200'.
    followed: Formats of further values of a step that its line shows, by their names.
  """

  name = 'the terminal'

  def __init__(
    self,
    max_steps: int,
    ahead: Callable[[int], str] = lambda step: '',
    followed: Mapping[str, str] = MappingProxyType({}),
  ):
    self._max_steps = max_steps
    self._ahead = ahead
    self._followed = followed
    self._said_at = -math.inf

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    now = time.monotonic()
    if not live_line.is_possible() or step == self._max_steps or now - self._said_at >= _SECONDS:
      self._said_at = now
      say(live_line.cut(train_line(step, self._max_steps, record, followed=self._followed)))
    if live_line.is_possible() and step < self._max_steps:
      self.progress(step, record)

  def progress(self, step: int, record: Mapping[str, Json]) -> None:
    line = lambda ahead: train_line(step, self._max_steps, record, ahead, self._followed)
    if not live_line.show(line(self._ahead(step))):
      say(line(''))

  def samples(self, step: int, generated: Mapping[str, str], verb: str = 'continuing') -> None:
    for prompt, text in generated.items():
      say(f'sample at step {step:,}, {verb} {prompt!r}: {text}')

  def close(self) -> None:
    live_line.close()


def train_line(
  step: int,
  max_steps: int,
  record: Mapping[str, Json],
  ahead: str = '',
  followed: Mapping[str, str] = MappingProxyType({}),
) -> str:
  """Returns the line of a training step; what matters most comes first, as terminals may cut it.

  Args:
    step: The step that has been taken.
    max_steps: The last step.
    record: What was measured of the step.
    ahead: What comes next, for a line that changes.
    followed: Formats of further values of the record, by their names.
  """
  parts = [f'step {step:,}/{max_steps:,}', f'loss {record["loss"]:.4f}']
  values = {name: record.get(name) for name in followed}
  parts += [followed[name].format(value) for name, value in values.items() if value is not None]
  seconds = record['step_seconds']
  if seconds:
    left = f'{duration(seconds * (max_steps - step))} left'
    parts += [left, f'{record["tokens_per_second"]:,.0f} tokens/s']
    if record['mfu'] is not None:
      parts.append(f'MFU {record["mfu"]:.1%}')
    elif record['model_tflops'] >= 1:
      parts.append(f'{record["model_tflops"]:.3g} TFLOP/s')
  parts += filter(None, [ahead, seconds and f'{seconds:.3f} s/step'])
  if record['lr'] is not None:  # an optimizer of one's own may not say it
    parts.append(f'lr {record["lr"]:.2e}')
  return '  '.join([*parts, f'grad {record["grad_norm"]:.3f}'])


def duration(seconds: float) -> str:
  """Returns a duration as text, such as '1:02:03' or '2:03'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{rest:02d}' if hours else f'{minutes}:{rest:02d}'


def _append(path: pathlib.Path, record: Mapping[str, Json]) -> None:
  clean = {
    k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
  }
  append_line(path, json.dumps(clean).encode())


def read_records(path: pathlib.Path) -> Iterator[JsonObject]:
  """Yields the records of a file that can be read; each has a step."""
  try:
    lines = path.read_bytes().split(b'\n')
  except OSError:
    return
  for line in lines:
    if (record := _record_of(line)) is not None:
      yield record


def drop_later_records(path: pathlib.Path, start: int) -> None:
  """Removes the records of steps after `start`, and an incomplete last line.

  If other lines are not records, the file is set aside, and a new one gets the good lines.
  """
  check_place(path)
  if not os.path.lexists(path):
    return
  if path.is_symlink() or not path.is_file():
    set_aside(path, 'it is not a regular file')
    return
  content = path.read_bytes()
  lines = list(filter(None, content.split(b'\n')))
  if lines and not content.endswith(b'\n') and _step_of(lines[-1]) is None:
    lines.pop()
  steps = list(map(_step_of, lines))
  kept = [
    line + b'\n'
    for line, step in zip(lines, steps, strict=True)
    if step is not None and step <= start
  ]
  unfinished = path.with_suffix('.tmp')
  with open_file(unfinished, 'wb') as f:
    f.writelines(kept)
  if None in steps:
    first = steps.index(None) + 1
    set_aside(path, f'line {first:,} is not a record; the run continues with the others')
  unfinished.replace(path)


def _step_of(line: bytes) -> int | None:
  """Returns the step of a record, or None if the line is not a record."""
  record = _record_of(line)
  return None if record is None else record['step']


def _record_of(line: bytes) -> JsonObject | None:
  """Returns the record that a line holds; it has a step. None if the line is not a record."""
  try:
    record = parsed(line)
  except ValueError:
    return None
  step = record.get('step') if isinstance(record, dict) else None
  return record if isinstance(step, int) and not isinstance(step, bool) else None
