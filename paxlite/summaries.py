"""What a run writes: a line on the terminal, metrics.jsonl, TensorBoard, and its configuration."""

import json
import math
import pathlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jax

# metrics.jsonl's names for what TensorBoard has under Pax's
_SHORT = {'loss': 'Metrics/total_loss', 'lr': 'learning/lr', 'grad_norm': 'learning/raw_grad_norm'}


class Summaries:
  """Writes a run's metrics. Only process 0 writes; the others' calls do nothing.

  Args:
    folder: The run's job_log_dir.
    max_steps: For the time left.
  """

  def __init__(self, folder: pathlib.Path, max_steps: int):
    self._folder = folder
    self._purge_step: int | None = None
    self._max_steps = max_steps
    self._boards: dict[str, Any] = {}
    self._live: Any = None
    self._enabled = jax.process_index() == 0
    if self._enabled and sys.stdout.isatty():
      self._live = _live_line()

  def drop_records_after(self, step: int) -> None:
    """Drops records of later steps, which a run that was killed has left and this one repeats."""
    self._purge_step = step + 1
    if self._enabled:
      for name in ('metrics.jsonl', 'eval_metrics.jsonl'):
        _drop_later_records(self._folder / name, step)

  def train(
    self, step: int, scalars: Mapping[str, float], speed: Mapping[str, float | None]
  ) -> None:
    """Reports one training step.

    Args:
      step: Steps done, this one included.
      scalars: By TensorBoard name.
      speed: tokens_per_second, step_seconds, model_tflops, mfu (None where unknown).
    """
    if not self._enabled:
      return
    short = {k: scalars[v] for k, v in _SHORT.items()}
    self._append('metrics.jsonl', {'step': step, **short, **speed})
    board = self._board('train', step)
    board.add_scalar('loss', scalars['Metrics/total_loss'], step)
    if speed['step_seconds']:
      board.add_scalar('Steps/sec', 1 / speed['step_seconds'], step)
    for name, value in scalars.items():
      board.add_scalar(name, value, step)
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
    """Writes what an evaluation found, and says it as `text`."""
    if not self._enabled:
      return
    self._append('eval_metrics.jsonl', {'step': step, 'input': name, **metrics})
    board = self._board(f'eval_{name}', step)
    for key, value in metrics.items():
      board.add_scalar(f'Metrics/{key}', value, step)
    self.say(f'eval {name} at step {step:,}: {text}')

  def say(self, text: str) -> None:
    """Prints a line that stays."""
    if self._enabled:
      if self._live is not None:
        self._live.console.print(text, highlight=False, markup=False)
      else:
        print(text, flush=True)

  def close(self) -> None:
    for board in self._boards.values():
      board.close()
    self._boards.clear()
    if self._live is not None:
      self._live.stop()
      self._live = None

  def _line(self, text: str) -> None:
    if self._live is not None:
      from rich.text import Text

      self._live.update(Text(text), refresh=True)
    else:
      print(text, flush=True)

  def _append(self, name: str, record: Mapping[str, Any]) -> None:
    clean = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    with (self._folder / name).open('a') as f:
      f.write(json.dumps(clean) + '\n')

  def _board(self, name: str, step: int) -> Any:
    if name not in self._boards:
      path = self._folder / 'summaries' / name
      self._boards[name] = _summary_writer()(str(path), purge_step=self._purge_step)
    return self._boards[name]


def _summary_writer() -> Any:
  """tensorboardX's SummaryWriter, without the seconds of importing torch where that is there."""
  modules: dict[str, Any] = sys.modules
  hide = 'torch' not in modules
  if hide:
    modules['torch'] = None  # `import torch` raises ImportError, which tensorboardX expects
  try:
    from tensorboardX import SummaryWriter
  finally:
    if hide:
      del modules['torch']
  return SummaryWriter


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
  """1:02:03 or 2:03."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{rest:02d}' if hours else f'{minutes}:{rest:02d}'


def _drop_later_records(path: pathlib.Path, start: int) -> None:
  """Removes records of steps after `start`, and a last line that was cut off."""
  if not path.exists():
    return
  kept = []
  for line in path.read_text().splitlines():
    try:
      record = json.loads(line)
    except ValueError:
      continue
    if record['step'] <= start:
      kept.append(line + '\n')
  unfinished = path.with_suffix('.tmp')
  unfinished.write_text(''.join(kept))
  unfinished.replace(path)


def versions() -> dict[str, Any]:
  """What this run runs on: packages, Python, devices."""
  import importlib.metadata

  packages = ('paxlite', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'fiddle', 'numpy')
  found = {}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = 'not installed as a package'
  devices = jax.devices()
  config: Any = jax.config
  return {
    'python': platform.python_version(),
    'packages': found,
    'devices': f'{len(devices)} × {devices[0].device_kind} ({devices[0].platform})',
    'processes': jax.process_count(),
    'jax_threefry_partitionable': bool(config.jax_threefry_partitionable),
  }
