"""Records a run's step: its predicted seconds, and the measured time of each block."""

import contextlib
import dataclasses
import itertools
import json
import logging
import pathlib
import re
import statistics
import threading
import time
from collections.abc import Callable

import jax

from paxlite.aot import analysis, traces
from paxlite.aot.chips import chip_of_kind
from paxlite.aot.roofline import Roofline, StepProgram
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import write_file
from paxlite.experiments.base import Experiment
from paxlite.losses.metrics import Metrics
from paxlite.programs.run import Run
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.profiling import StepProfiler
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer

PREDICTED, BLOCKS = 'predicted.json', 'step_blocks.json'  # in a run's folder
_FIRST, _LAST = 10, 50  # the steps of a start that are measured
_PATIENCE = 60.0  # seconds for which the end of a run waits for the program or the trace

log = logging.getLogger('paxlite')


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns the callback of a run, which gets its compiled step and its traces."""
  measured = MeasuredStep(run.experiment, trainer.store.task.mesh, run.folder)
  trainer.compiler = dataclasses.replace(trainer.compiler, on_compiled=measured.take)
  for callback in trainer.callbacks:
    if isinstance(callback, StepProfiler):
      callback.on_traced = measured.traced
  return [measured]


class MeasuredStep(Callback):
  """Compares the step of a run with what its compiled program was predicted to take.

  After 50 steps of a start, process 0 says how long steps take and were predicted to take, if the
  chip is known. The line comes after the step at which the program is read: a thread does that, as
  it takes seconds for large models. Another one reads each trace, for the blocks of the model.

  Args:
    mesh: The mesh of the run.
    folder: The run's folder, where `predicted.json` and `step_blocks.json` are written.
  """

  def __init__(self, experiment: Experiment, mesh: jax.sharding.Mesh, folder: pathlib.Path):
    device = mesh.devices.flat[0]
    self._chip, self._devices = chip_of_kind(device.device_kind), mesh.local_devices
    self._machine = analysis.platform_of(device), analysis.links_of(experiment, mesh), self._chip
    self._folder = folder
    self._compiled: jax.stages.Compiled | None = None
    self._reader: threading.Thread | None = None
    self._tracer: threading.Thread | None = None
    self._predicted: Roofline | None = None
    self._start, self._times, self._said = 0, list[float](), False

  def take(self, compiled: jax.stages.Compiled) -> None:
    """Gets the executable of the step."""
    self._compiled = compiled

  def traced(self, folder: pathlib.Path, steps: int) -> None:
    """Reads a complete trace of `steps` steps from its folder."""
    self._tracer = _begun(lambda: self._read_trace(folder, steps))

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    self._start, self._times = step, []
    if jax.process_index() == 0 and not self._said:  # it may be of other devices
      with contextlib.suppress(OSError):
        (self._folder / PREDICTED).unlink(missing_ok=True)

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    if self._said or self._chip is None or jax.process_index() > 0:
      return
    if step - self._start <= _LAST:
      # the loop waits for the step before the last one, so that this is the pace of the devices
      self._times.append(time.monotonic())
    if step - self._start == _LAST and self._reader is None:
      self._reader = _begun(self._predict)
    if self._reader is not None and not self._reader.is_alive():
      self._say(step, loop)

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    for thread in filter(None, (self._reader, self._tracer)):
      thread.join(timeout=_PATIENCE)
    if self._reader is not None and not self._said:
      self._say(step, loop)

  def _program(self) -> tuple[StepProgram, str]:
    """Returns the program and its name; raises ValueError if there is none, or it has no text."""
    text = (self._compiled and self._compiled.as_text()) or ''
    name = re.match(r'HloModule ([^\s,]+)', text)
    return StepProgram(text, *self._machine), name[1] if name else ''

  def _predict(self) -> None:
    self._predicted = self._program()[0].summary().roofline

  def _say(self, step: int, loop: Loop) -> None:
    self._said = True
    predicted = self._predicted
    if predicted is None or self._chip is None or len(self._times) < _LAST:
      return
    steps = [later - earlier for earlier, later in itertools.pairwise(self._times[_FIRST:])]
    measured = statistics.median(steps)
    parts = ', '.join(f'{1e3 * s:.1f} of {name}' for name, s in predicted.parts.items() if s)
    said = f'{1e3 * predicted.step:.1f} ms were predicted ({parts})'
    loop.summaries.say(f'A step takes {1e3 * measured:.1f} ms; {said}')
    self._write(PREDICTED, {
      'step': step, 'measured_seconds': measured, 'measured_steps': len(steps),
      'predicted_seconds': predicted.step, 'chip': self._chip.name,
      'predicted_parts': predicted.parts, 'memory': self._memory(),
    })  # fmt: skip

  def _memory(self) -> dict[str, int]:
    """Returns the predicted bytes of a device, and the most that were in use so far."""
    found, memory = {}, self._compiled and self._compiled.memory_analysis()
    if memory is not None:
      found['predicted_bytes'] = analysis.peak(memory, self._devices[0].platform)
    used = [(d.memory_stats() or {}).get('peak_bytes_in_use', 0) for d in self._devices]
    if most := max(used, default=0):
      found['measured_bytes'] = most
    return found

  def _read_trace(self, folder: pathlib.Path, steps: int) -> None:
    program, name = self._program()
    if measured := traces.seconds(folder, name, steps):
      chip = None if self._chip is None else self._chip.name
      blocks = program.blocks(measured)
      self._write(BLOCKS, {'steps': steps, 'chip': chip, 'blocks': blocks})

  def _write(self, name: str, found: JsonObject) -> None:
    with contextlib.suppress(OSError):
      write_file(self._folder / name, json.dumps(found, indent=2).encode())


def _begun(job: Callable[[], None]) -> threading.Thread:
  """Returns a thread that does a job; what it raises is no reason to disturb a run."""

  def run() -> None:
    try:
      job()
    except Exception as e:
      log.debug('the step was not measured: %r', e)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  return thread
