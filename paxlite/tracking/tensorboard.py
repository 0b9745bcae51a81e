"""Writes the metrics of a run for TensorBoard, with Pax's names."""

import pathlib
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from paxlite.core.json_text import Json
from paxlite.core.run_files import make_folder
from paxlite.tracking.writers import Writer

_EVENTS = 'events.out.tfevents.'
_DIGITS = 19  # number of digits of a time in nanoseconds
# names of speeds in a record, and here
_SPEEDS = {'tokens_per_second': 'Tokens/sec', 'model_tflops': 'TFLOPs/sec/device', 'mfu': 'MFU'}


class TensorBoard(Writer):
  """Events in summaries/train and summaries/eval_NAME."""

  name = 'summaries'

  def __init__(self, folder: pathlib.Path):
    self._folder = folder / self.name
    self._purge_step: int | None = None
    self._boards: dict[str, _Board] = {}

  def rewind(self, step: int, evaluated: int) -> None:
    self.close()
    self._purge_step = step + 1

  def train(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
    shown = {'loss': scalars['Metrics/total_loss'], **scalars}
    if record['step_seconds']:
      shown['Steps/sec'] = 1 / record['step_seconds']
    shown |= {tag: record[k] for k, tag in _SPEEDS.items() if record[k] is not None}
    values = [{'tag': k, 'simple_value': v} for k, v in shown.items()]
    self._add('train', step, values)

  def evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
    values = [{'tag': f'Metrics/{k}', 'simple_value': v} for k, v in metrics.items()]
    self._add(f'eval_{name}', step, values)

  def samples(self, step: int, generated: Mapping[str, str], verb: str = 'continuing') -> None:
    metadata = {'plugin_data': {'plugin_name': 'text'}}
    self._add('train', step, [
      {
        'tag': f'sample {number}',
        'metadata': metadata,
        'tensor': {'dtype': 'DT_STRING', 'string_val': [f'**{prompt}** {text}'.encode()]},
      }
      for number, (prompt, text) in enumerate(generated.items())
    ])  # fmt: skip

  def close(self) -> None:
    for board in self._boards.values():
      board.close()
    self._boards.clear()

  def _add(self, name: str, step: int, values: list[dict[str, object]]) -> None:
    """Adds values to the events of summaries/`name`, with unusual characters replaced."""
    name = re.sub('[^A-Za-z0-9._-]', '_', name)
    try:
      if name not in self._boards:
        self._boards[name] = _Board(self._folder / name, self._purge_step)
      self._boards[name].write(summary={'value': values}, step=step)
    except OSError:
      # readers stop at an incomplete record, so the next record goes to a new file
      self._boards.pop(name, None)
      raise


class _Board:
  """One file of TensorBoard events.

  Args:
    folder: The folder that TensorBoard reads.
    purge_step: TensorBoard hides earlier files' events from this step on; None hides nothing.
  """

  def __init__(self, folder: pathlib.Path, purge_step: int | None):
    self._event, record_writer = _tensorboard()
    make_folder(folder)
    self._records = record_writer(str(folder / _events_name(folder)))
    self.write(file_version='brain.Event:2', step=purge_step or 0)
    if purge_step is not None:
      self.write(session_log={'status': 'START'}, step=purge_step)

  def close(self) -> None:
    self._records.close()

  def write(self, **fields: object) -> None:
    """Writes an event with these fields."""
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
