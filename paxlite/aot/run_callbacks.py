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

from paxlite.aot import analysis
from paxlite.aot.chips import chip_of_kind
from paxlite.aot.roofline import ProgramCosts, Roofline, StepProgram, costs_of
from paxlite.aot.step_blocks import blocks_of, traced_seconds
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
    device: A device of the mesh.
    platform: Its kind.
    chip: Its data sheet; None if it is not known.
    links: The mesh.
    devices: The devices of this process.
  """

  def __init__(self, experiment: Experiment, mesh: jax.sharding.Mesh):
    device = mesh.devices.flat[0]
    self.program: jax.stages.Compiled | None = None
    self.platform = analysis.platform_of(device)
    self.chip = chip_of_kind(device.device_kind)
    self.links = analysis.links_of(experiment, mesh)
    self.devices = mesh.local_devices

  def take(self, compiled: jax.stages.Compiled) -> None:
    self.program = compiled

  def read(self) -> tuple[StepProgram, str]:
    """Returns the program and its name; raises ValueError if there is none, or it has no text."""
    text = (self.program and self.program.as_text()) or ''
    name = re.match(r'HloModule ([^\s,]+)', text)
    return StepProgram(text, self.platform, self.links, self.chip), name[1] if name else ''


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
    self._costs: ProgramCosts | None = None
    self._bytes = 0  # of a device, predicted
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
    step = self._compiled
    try:
      if step.program is not None and (memory := step.program.memory_analysis()) is not None:
        self._bytes = analysis.peak(memory, step.platform)
      self._costs = costs_of(step.read()[0])
    except Exception as e:  # a prediction is no reason to disturb a run
      log.debug('the program of the step was not read: %r', e)

  def _say(self, step: int, loop: Loop) -> None:
    self._said = True
    costs, chip = self._costs, self._compiled.chip
    predicted = None if costs is None else costs.roofline
    if costs is None or predicted is None or chip is None or len(self._times) < _LAST:
      return
    steps = [later - earlier for earlier, later in itertools.pairwise(self._times[_FIRST:])]
    measured = statistics.median(steps)
    loop.summaries.say(sentence(predicted, measured))
    found = {
      'step': step,
      'measured_seconds': measured,
      'measured_steps': len(steps),
      'predicted_seconds': predicted.step,
      'chip': chip.name,
      'parts': dataclasses.asdict(predicted),
      'kernels': dict(costs.kernel_seconds),
      'memory': self._memory(),
    }
    with contextlib.suppress(OSError):  # the line was printed
      write_file(self._path, json.dumps(found, indent=2).encode())

  def _memory(self) -> dict[str, int]:
    """Returns the predicted bytes of a device, and the most that were in use so far."""
    found = {'predicted_bytes': self._bytes} if self._bytes else {}
    used = [(d.memory_stats() or {}).get('peak_bytes_in_use', 0) for d in self._compiled.devices]
    if most := max(used, default=0):
      found['measured_bytes'] = most
    return found


def sentence(predicted: Roofline, measured: float) -> str:
  """Returns what was predicted, by its parts, and what was measured."""
  names = (
    'matmuls and attention', 'other kernels', 'collectives that nothing hides',
    'copies from and to the host',
  )  # fmt: skip
  parts = zip(names, predicted.parts.values(), strict=True)
  named = ', '.join(f'{1e3 * seconds:.1f} of {name}' for name, seconds in parts if seconds)
  said = f'{1e3 * predicted.step:.1f} ms were predicted ({named})'
  return f'A step takes {1e3 * measured:.1f} ms; {said}'


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
    step = self._compiled
    try:
      program, name = step.read()
      measured = traced_seconds(folder, name, steps)
      if not measured:
        log.debug('the trace names no instruction of the train step')
        return
      blocks = blocks_of(program, measured)
    except Exception as e:  # a measurement is no reason to disturb a run
      log.debug('the trace was not read: %r', e)
      return
    found = {
      'steps': steps,
      'chip': None if step.chip is None else step.chip.name,
      'blocks': blocks,
    }
    with contextlib.suppress(OSError):
      write_file(self._path, json.dumps(found, indent=2).encode())
