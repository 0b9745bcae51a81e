"""Sends the metrics of a run to its writers."""

import logging
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import jax

from paxlite.cli.terminal import say
from paxlite.tracking.tensorboard import TensorBoard
from paxlite.tracking.writers import EvalRecords, SampleRecords, TerminalLines, TrainRecords, Writer

log = logging.getLogger('paxlite')

# names in metrics.jsonl, and Pax's names of the same values, which TensorBoard has
_SHORT = {
  'loss': 'Metrics/total_loss', 'lr': 'learning/lr', 'grad_norm': 'learning/raw_grad_norm',
  'skipped_steps': 'learning/skipped_steps',
}  # fmt: skip


def short(scalars: Mapping[str, float], followed: Iterable[str]) -> dict[str, float | None]:
  """Returns what metrics.jsonl has of the scalars of a step, by the names there.

  Args:
    scalars: Values by their TensorBoard names.
    followed: Metrics that records have beside the loss.
  """
  names = _SHORT | {name: f'Metrics/{name}' for name in followed}
  return {name: scalars.get(found) for name, found in names.items()}


class Summaries:
  """Sends a run's metrics to its writers. Only process 0 does; elsewhere calls do nothing.

  A writer that fails is reported once, and the run continues.

  Args:
    folder: The run's job_log_dir.
    max_steps: The last step, from which the remaining time is computed.
    ahead: Returns what comes next after a step, for the terminal.
    trackers: Writers in addition to the files, TensorBoard and the terminal.
    followed: Formats of metrics that records and lines of steps have beside the loss, by names.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    max_steps: int,
    ahead: Callable[[int], str] = lambda step: '',
    trackers: Sequence[Writer] = (),
    followed: Mapping[str, str] = MappingProxyType({}),
  ):
    self._followed = tuple(followed)
    self._folder = folder
    self._failed: set[str] = set()
    self._writers: list[Writer] = []
    if jax.process_index() == 0:
      files = [
        TrainRecords(folder), EvalRecords(folder), SampleRecords(folder), TensorBoard(folder),
      ]  # fmt: skip
      self._writers = [*files, TerminalLines(max_steps, ahead, followed), *trackers]

  def start(self) -> None:
    """Starts the writers; raises UserError if one cannot."""
    for writer in self._writers:
      writer.start()

  def drop_records_after(self, step: int, evaluated: int) -> None:
    """Drops the records of later steps, because the run does these steps again.

    Such records are left over if a run was killed, and after a rollback.

    Args:
      step: The last step that is not repeated.
      evaluated: The last step whose evaluation is not repeated.
    """
    self._send(lambda writer: writer.rewind(step, evaluated))

  def train(
    self, step: int, scalars: Mapping[str, float], speed: Mapping[str, float | None]
  ) -> None:
    """Records one training step.

    Args:
      step: Number of steps done, including this one.
      scalars: Values by their TensorBoard names.
      speed: tokens_per_second, step_seconds, model_tflops and mfu; unknown values are None.
    """
    record = short(scalars, self._followed) | dict(speed)
    self._send(lambda writer: writer.train(step, record, scalars))

  def progress(
    self, step: int, scalars: Mapping[str, float], speed: Mapping[str, float | None]
  ) -> None:
    """Shows a training step that is not recorded; the arguments are those of `train`."""
    record = short(scalars, self._followed) | dict(speed)
    self._send(lambda writer: writer.progress(step, record))

  def evaluation(
    self,
    step: int,
    name: str,
    metrics: Mapping[str, float],
    seconds: float,
    shown: Mapping[str, str],
  ) -> None:
    """Reports one evaluation.

    Args:
      step: Number of steps done.
      name: Name of the input.
      metrics: The metrics of the evaluation.
      seconds: The time that it took.
      shown: The formats of the metrics that are printed, by their names.
    """
    parts = [text.format(metrics[key]) for key, text in shown.items() if key in metrics]
    self.result(step, name, metrics, f'{"  ".join(parts)} in {seconds:.1f} s')

  def result(self, step: int, name: str, metrics: Mapping[str, float], text: str) -> None:
    """Writes the metrics of an evaluation of input `name`, and prints `text` on the terminal."""
    self._send(lambda writer: writer.evaluation(step, name, metrics))
    self.say(f'eval {name} at step {step:,}: {text}')

  def samples(self, step: int, generated: Mapping[str, str], verb: str = 'continuing') -> None:
    """Reports texts that the model has generated, by their prompts; `verb` says how."""
    self._send(lambda writer: writer.samples(step, generated, verb))

  def say(self, text: str) -> None:
    """Prints a line."""
    if self._writers:
      say(text)

  def write_kept(self) -> None:
    """Writes records that could not be written before; also after `close`."""
    self._send(lambda writer: writer.write_kept())

  def close(self) -> None:
    self._send(lambda writer: writer.close())

  def _send(self, act: Callable[[Writer], None]) -> None:
    """Applies `act` to every writer, and reports a writer that fails once."""
    for writer in self._writers:
      try:
        act(writer)
      except writer.failures as e:
        if writer.name not in self._failed:
          reason = getattr(e, 'strerror', None) or ' '.join(str(e).split()) or type(e).__name__
          of_file = isinstance(e, OSError)
          what = (
            f'{self._folder / writer.name} cannot be written'
            if of_file
            else (f'{writer.name} failed')
          )
          log.error('%s, training continues: %s', what, reason)
        self._failed.add(writer.name)
