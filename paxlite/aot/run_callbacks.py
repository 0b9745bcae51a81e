"""What a run writes of its compiled step: its predicted seconds, and what each block has taken.

Threads read the program and the trace, which takes seconds for large models.
"""

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
_PATIENCE = 60.0  # seconds for which the end of a run waits for the blocks of a trace

log = logging.getLogger('paxlite')


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns the callbacks of a run, which get its compiled step and its traces."""
  step = CompiledStep(run.experiment, trainer.store.task.mesh)
  measured = MeasuredBlocks(step, run.folder)
  trainer.compiler = dataclasses.replace(trainer.compiler, on_compiled=step.take)
  for callback in trainer.callbacks:
    if isinstance(callback, StepProfiler):
      callback.on_traced = measured.traced
  return [PredictedStep(step, run.folder), measured]


class CompiledStep:
  """The executable of a run's step, once there is one, and its machine.

  Attributes:
    program: The executable, or None.
    chip: The data sheet of a device of the mesh; None if it is not known.
    devices: The devices of this process.
  """

  def __init__(self, experiment: Experiment, mesh: jax.sharding.Mesh):
    device = mesh.devices.flat[0]
    self.program: jax.stages.Compiled | None = None
    self.chip = chip_of_kind(device.device_kind)
    self.devices = mesh.local_devices
    self._machine = analysis.platform_of(device), analysis.links_of(experiment, mesh), self.chip

  def take(self, compiled: jax.stages.Compiled) -> None:
    self.program = compiled

  def read(self) -> tuple[StepProgram, str]:
    """Returns the program and its name; raises ValueError if there is none, or it has no text."""
    text = (self.program and self.program.as_text()) or ''
    name = re.match(r'HloModule ([^\s,]+)', text)
    return StepProgram(text, *self._machine), name[1] if name else ''

  def memory(self) -> dict[str, int]:
    """Returns the predicted bytes of a device, and the most that were in use so far."""
    found, memory = {}, self.program and self.program.memory_analysis()
    if memory is not None:
      found['predicted_bytes'] = analysis.peak(memory, self.devices[0].platform)
    used = [(d.memory_stats() or {}).get('peak_bytes_in_use', 0) for d in self.devices]
    if most := max(used, default=0):
      found['measured_bytes'] = most
    return found


def _write(path: pathlib.Path, found: JsonObject) -> None:
  with contextlib.suppress(OSError):  # no reason to disturb a run
    write_file(path, json.dumps(found, indent=2).encode())


class PredictedStep(Callback):
  """After 50 steps of a start, says how long steps take and were predicted to take.

  Only process 0 does so, and only for devices whose chip is known. The line comes after the step at
  which the program is read.

  Args:
    step: The step.
    folder: The run's folder, where `predicted.json` is written.
  """

  def __init__(self, step: CompiledStep, folder: pathlib.Path):
    self._compiled, self._path = step, folder / PREDICTED
    self._thread: threading.Thread | None = None
    self._predicted: Roofline | None = None
    self._start, self._times, self._said = 0, list[float](), False

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    self._start, self._times = step, []
    if jax.process_index() == 0 and not self._said:  # it may be of other devices
      with contextlib.suppress(OSError):
        self._path.unlink(missing_ok=True)

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    if self._said or self._compiled.chip is None or jax.process_index() > 0:
      return
    if step - self._start <= _LAST:
      # the loop waits for the step before the last one, so that this is the pace of the devices
      self._times.append(time.monotonic())
    if step - self._start == _LAST and self._thread is None:
      self._thread = threading.Thread(target=self._read, daemon=True)
      self._thread.start()
    if self._thread is not None and not self._thread.is_alive():
      self._say(step, loop)

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    if self._thread is not None and not self._said:
      self._thread.join(timeout=10)
      self._say(step, loop)

  def _read(self) -> None:
    try:
      self._predicted = self._compiled.read()[0].summary().roofline
    except Exception as e:  # a prediction is no reason to disturb a run
      log.debug('the program of the step was not read: %r', e)

  def _say(self, step: int, loop: Loop) -> None:
    self._said = True
    predicted, chip = self._predicted, self._compiled.chip
    if predicted is None or chip is None or len(self._times) < _LAST:
      return
    steps = [later - earlier for earlier, later in itertools.pairwise(self._times[_FIRST:])]
    measured = statistics.median(steps)
    parts = ', '.join(f'{1e3 * s:.1f} of {name}' for name, s in predicted.parts.items() if s)
    said = f'{1e3 * predicted.step:.1f} ms were predicted ({parts})'
    loop.summaries.say(f'A step takes {1e3 * measured:.1f} ms; {said}')
    found = {
      'step': step,
      'measured_seconds': measured,
      'measured_steps': len(steps),
      'predicted_seconds': predicted.step,
      'chip': chip.name,
      'predicted_parts': predicted.parts,
      'memory': self._compiled.memory(),
    }
    _write(self._path, found)


class MeasuredBlocks(Callback):
  """Writes what each block of the model has taken of the steps that were traced.

  Args:
    step: The step.
    folder: The run's folder, where `step_blocks.json` is written.
  """

  def __init__(self, step: CompiledStep, folder: pathlib.Path):
    self._compiled, self._path = step, folder / BLOCKS
    self._thread: threading.Thread | None = None

  def traced(self, folder: pathlib.Path, steps: int) -> None:
    """Reads a complete trace of so many steps from its folder."""
    self._thread = threading.Thread(target=self._read, args=(folder, steps), daemon=True)
    self._thread.start()

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    if self._thread is not None:
      self._thread.join(timeout=_PATIENCE)

  def _read(self, folder: pathlib.Path, steps: int) -> None:
    try:
      program, name = self._compiled.read()
      measured = traces.seconds(folder, name, steps)
      if not measured:
        log.debug('the trace names no instruction of the train step')
        return
      blocks = program.blocks(measured)
    except Exception as e:  # a measurement is no reason to disturb a run
      log.debug('the trace was not read: %r', e)
      return
    chip = self._compiled.chip
    found = {'steps': steps, 'chip': None if chip is None else chip.name, 'blocks': blocks}
    _write(self._path, found)
