"""Writes the metrics of a run to the terminal, to metrics.jsonl and to TensorBoard."""

import contextlib
import json
import logging
import math
import os
import pathlib
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from paxlite.core.damaged import set_aside
from paxlite.core.run_files import open_file
from paxlite.core.terminal import say

log = logging.getLogger('paxlite')

_EVENTS = 'events.out.tfevents.'
_DIGITS = 19  # number of digits of a time in nanoseconds
# names in metrics.jsonl, and Pax's names of the same values, which TensorBoard has
_SHORT = {'loss': 'Metrics/total_loss', 'lr': 'learning/lr', 'grad_norm': 'learning/raw_grad_norm'}


class Summaries:
  """Writes a run's metrics. Only process 0 writes; calls in other processes do nothing.

  Args:
    folder: The run's job_log_dir.
    max_steps: The last step, from which the remaining time is computed.
  """

  def __init__(self, folder: pathlib.Path, max_steps: int):
    self._folder = folder
    self._purge_step: int | None = None
    self._max_steps = max_steps
    self._boards: dict[str, _Board] = {}
    self._unwritable: set[str] = set()
    self._live: Any = None
    self._enabled = jax.process_index() == 0
    if self._enabled and sys.stdout is not None and sys.stdout.isatty():
      self._live = _live_line()

  def drop_records_after(self, step: int, evaluated: int) -> None:
    """Drops the records of later steps, because the run does these steps again.

    Such records are left over if a run was killed, and after a rollback.

    Args:
      step: The last step that is not repeated.
      evaluated: The last step whose evaluation is not repeated.
    """
    self._close_boards()
    self._purge_step = step + 1
    if self._enabled:
      for name, last in (('metrics.jsonl', step), ('eval_metrics.jsonl', evaluated)):
        with self._going_on(name):
          _drop_later_records(self._folder / name, last)

  def train(
    self, step: int, scalars: Mapping[str, float], speed: Mapping[str, float | None]
  ) -> None:
    """Reports one training step.

    Args:
      step: Number of steps done, including this one.
      scalars: Values by their TensorBoard names.
      speed: tokens_per_second, step_seconds, model_tflops and mfu; unknown values are None.
    """
    if not self._enabled:
      return
    short = {k: scalars[v] for k, v in _SHORT.items()}
    self._append('metrics.jsonl', {'step': step, **short, **speed})
    on_board = {'loss': scalars['Metrics/total_loss'], **scalars}
    if speed['step_seconds']:
      on_board['Steps/sec'] = 1 / speed['step_seconds']
    self._show('train', step, on_board)
    self._line(_train_line(step, self._max_steps, short, speed))

  def progress(
    self, step: int, scalars: Mapping[str, float], speed: Mapping[str, float | None]
  ) -> None:
    """Shows a training step on the terminal only; the arguments are those of `train`."""
    if self._enabled:
      short = {k: scalars[v] for k, v in _SHORT.items()}
      self._line(_train_line(step, self._max_steps, short, speed))

  def evaluation(self, step: int, name: str, metrics: Mapping[str, float], seconds: float) -> None:
    """Reports one evaluation of input `name`."""
    bits = f'  {metrics["bits_per_byte"]:.3f} bits per byte' if 'bits_per_byte' in metrics else ''
    self.result(
      step,
      name,
      metrics,
      f'loss {metrics["avg_xent"]:.4f}{bits}  '
      f'accuracy {metrics["fraction_of_correct_next_step_preds"]:.3f}  '
      f'{metrics["num_predictions"]:,.0f} tokens in {seconds:.1f} s',
    )

  def result(self, step: int, name: str, metrics: Mapping[str, float], text: str) -> None:
    """Writes the metrics of an evaluation of input `name`, and prints `text` on the terminal."""
    if not self._enabled:
      return
    self._append('eval_metrics.jsonl', {'step': step, 'input': name, **metrics})
    self._show(f'eval_{name}', step, {f'Metrics/{k}': v for k, v in metrics.items()})
    self.say(f'eval {name} at step {step:,}: {text}')

  def say(self, text: str) -> None:
    """Prints a line that later lines do not replace."""
    if self._enabled and not self._on_live(
      lambda live: live.console.print(text, highlight=False, markup=False)
    ):
      say(text)

  def close(self) -> None:
    self._close_boards()
    self._on_live(lambda live: live.stop())
    self._live = None

  def _close_boards(self) -> None:
    for board in self._boards.values():
      board.close()
    self._boards.clear()

  def _line(self, text: str) -> None:
    def renew(live: Any) -> None:
      from rich.text import Text

      live.update(Text(text), refresh=True)

    if not self._on_live(renew):
      say(text)

  def _on_live(self, act: Callable[[Any], None]) -> bool:
    """Applies `act` to the live line; returns False if there is none, or if it has just failed."""
    if self._live is None:
      return False
    try:
      act(self._live)
    except (OSError, ValueError):  # ValueError: the terminal's encoding lacks a character
      live, self._live = self._live, None
      with contextlib.suppress(OSError, ValueError):
        live.stop()
      return False
    return True

  def _append(self, name: str, record: Mapping[str, Any]) -> None:
    clean = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    with self._going_on(name), open_file(self._folder / name, 'ab', buffering=0) as f:
      end = f.tell()
      try:
        f.write(json.dumps(clean).encode() + b'\n')
      except OSError:
        f.truncate(end)  # removes an incomplete record
        raise

  def _show(self, name: str, step: int, scalars: Mapping[str, float]) -> None:
    """Writes scalars for TensorBoard into summaries/`name`, with unusual characters replaced."""
    name = re.sub('[^A-Za-z0-9._-]', '_', name)
    with self._going_on(f'summaries/{name}'):
      try:
        if name not in self._boards:
          self._boards[name] = _Board(self._folder / 'summaries' / name, self._purge_step)
        self._boards[name].add(step, scalars)
      except OSError:
        # readers stop at an incomplete record, so the next record goes to a new file
        self._boards.pop(name, None)
        raise

  @contextlib.contextmanager
  def _going_on(self, name: str) -> Iterator[None]:
    """A context that reports a file that cannot be written, once, and lets training continue."""
    try:
      yield
    except OSError as e:
      if name not in self._unwritable:
        log.error('%s/%s cannot be written, training continues: %s', self._folder, name, e.strerror)
      self._unwritable.add(name)


class _Board:
  """One file of TensorBoard events.

  Args:
    folder: The folder that TensorBoard reads.
    purge_step: TensorBoard hides earlier files' events from this step on; None hides nothing.
  """

  def __init__(self, folder: pathlib.Path, purge_step: int | None):
    self._event, record_writer = _tensorboard()
    folder.mkdir(parents=True, exist_ok=True)
    self._records = record_writer(str(folder / _events_name(folder)))
    self._write(file_version='brain.Event:2', step=purge_step or 0)
    if purge_step is not None:
      self._write(session_log={'status': 'START'}, step=purge_step)

  def add(self, step: int, scalars: Mapping[str, float]) -> None:
    """Adds scalars by their names."""
    values = [{'tag': k, 'simple_value': v} for k, v in scalars.items()]
    self._write(summary={'value': values}, step=step)

  def close(self) -> None:
    self._records.close()

  def _write(self, **fields: Any) -> None:
    self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
    self._records.flush()


def _events_name(folder: pathlib.Path) -> str:
  """Returns a file name that sorts after those in the folder, even if the clock was set back.

  TensorBoard reads a run's files in the order of their names. When a run continues from an earlier
  step, TensorBoard drops the later steps only from files that come before the new file.
  """
  stamps = [p.name.removeprefix(_EVENTS).partition('.')[0] for p in folder.glob(f'{_EVENTS}*')]
  newest = max((s for s in stamps if s.isascii() and s.isdigit()), default='0')
  after = str(int(newest[:_DIGITS]) + 1)
  stamp = max(str(time.time_ns()), after.ljust(_DIGITS, '0'))
  return f'{_EVENTS}{stamp}.{socket.gethostname()}'


def _tensorboard() -> tuple[Any, Any]:
  """Returns tensorboardX's Event and RecordWriter, without importing torch, which takes seconds.

  tensorboardX's SummaryWriter is not used: its thread ends when the disk is full, and adding events
  to its full queue then blocks forever.
  """
  modules: dict[str, Any] = sys.modules
  hide = 'torch' not in modules
  if hide:
    modules['torch'] = None  # `import torch` raises ImportError, which tensorboardX expects
  try:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter
  finally:
    if hide:
      del modules['torch']
  return Event, RecordWriter


def _live_line() -> Any:
  from rich.live import Live

  live = Live('', auto_refresh=False)
  live.start()
  return live


def _train_line(
  step: int, max_steps: int, short: Mapping[str, float], speed: Mapping[str, float | None]
) -> str:
  parts = [
    f'step {step:,}/{max_steps:,}',
    f'loss {short["loss"]:.4f}',
    f'lr {short["lr"]:.2e}',
    f'grad {short["grad_norm"]:.3f}',
  ]
  seconds = speed['step_seconds']
  if seconds:
    parts += [f'{speed["tokens_per_second"]:,.0f} tokens/s', f'{speed["model_tflops"]:.3g} TFLOP/s']
    if speed['mfu'] is not None:
      parts.append(f'MFU {speed["mfu"]:.1%}')
    parts += [f'{seconds:.3f} s/step', f'{duration(seconds * (max_steps - step))} left']
  return '  '.join(parts)


def duration(seconds: float) -> str:
  """Returns a duration as text, such as '1:02:03' or '2:03'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{rest:02d}' if hours else f'{minutes}:{rest:02d}'


def _drop_later_records(path: pathlib.Path, start: int) -> None:
  """Removes the records of steps after `start`, and an incomplete last line.

  If other lines are not records, the file is set aside, and a new one gets the good lines.
  """
  if not os.path.lexists(path):
    return
  if path.is_symlink() or not path.is_file():
    set_aside(path, 'it is not a file of its own')
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
    set_aside(path, f'line {first:,} is no record; the run continues with the others')
  unfinished.replace(path)


def _step_of(line: bytes) -> int | None:
  """Returns the step of a record, or None if the line is not a record."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  step = record.get('step') if isinstance(record, dict) else None
  return step if isinstance(step, int) and not isinstance(step, bool) else None
