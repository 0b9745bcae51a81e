"""What a step is foreseen to take on its devices, beside what it takes."""

import contextlib
import dataclasses
import itertools
import json
import logging
import pathlib
import statistics
import threading
import time

import jax

import paxlite
from paxlite.aot import analysis, step_calibration
from paxlite.aot.chips import Chip, chip_of_kind
from paxlite.aot.roofline import ProgramCosts, Roofline, costs_of
from paxlite.aot.step_calibration import StepCalibration
from paxlite.compilation import compiled_step
from paxlite.core.run_files import write_file
from paxlite.experiments.base import Experiment
from paxlite.losses.metrics import Metrics
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_state import TrainState

FILE = 'foreseen.json'  # in a run's folder
_FIRST, _LAST = 10, 50  # the steps of a start that are measured

log = logging.getLogger('paxlite')


class Foresight(Callback):
  """Says how long steps take and how long they were foreseen to take, after 50 steps of a start.

  It also writes what the next plan takes as --calibration; see step_calibration.

  Only process 0 does so, and only for devices whose chip is known. A thread then reads the compiled
  program, which takes seconds for large models; the line comes after the step at which it is done.

  Args:
    experiment: The experiment.
    mesh: Its mesh.
    folder: The run's folder, where `foreseen.json` and `calibration.json` are written.
  """

  def __init__(self, experiment: Experiment, mesh: jax.sharding.Mesh, folder: pathlib.Path):
    self._experiment, self._mesh, self._folder = experiment, mesh, folder
    self._chip = chip_of_kind(mesh.devices.flat[0].device_kind)
    self._compiled: jax.stages.Compiled | None = None
    self._thread: threading.Thread | None = None
    self._foreseen: ProgramCosts | None = None
    self._bytes = 0  # of a device, foreseen
    self._start, self._times, self._said = 0, list[float](), False

  def compiled(self, compiled: jax.stages.Compiled) -> None:
    """Takes the step's executable."""
    if self._chip is not None and jax.process_index() == 0:
      self._compiled = compiled

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    self._start, self._times = step, []
    if jax.process_index() == 0 and not self._said:  # it may be of other devices
      with contextlib.suppress(OSError):
        (self._folder / FILE).unlink(missing_ok=True)
        (self._folder / step_calibration.FILE).unlink(missing_ok=True)

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    if self._compiled is None or self._said or self._chip is None:
      return
    if step - self._start <= _LAST:
      # the loop waits for the step before the last one, so that this is the pace of the devices
      self._times.append(time.monotonic())
    if step - self._start == _LAST and self._thread is None:
      arguments = self._compiled, self._chip
      self._thread = threading.Thread(target=self._read, args=arguments, daemon=True)
      self._thread.start()
    if self._thread is not None and not self._thread.is_alive():
      self._say(step, loop)

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    if self._thread is not None and not self._said:
      self._thread.join(timeout=10)
      self._say(step, loop)

  def _read(self, compiled: jax.stages.Compiled, chip: Chip) -> None:
    try:
      links = analysis.links_of(self._experiment, self._mesh)
      platform = analysis.platform_of(self._mesh.devices.flat[0])
      if (memory := compiled.memory_analysis()) is not None:
        self._bytes = analysis.peak(memory, platform)
      self._foreseen = costs_of(compiled.as_text() or '', platform, links, chip)
    except Exception as e:  # a forecast is no reason to disturb a run
      log.debug('the program of the step was not read: %r', e)

  def _say(self, step: int, loop: Loop) -> None:
    self._said = True
    costs, chip = self._foreseen, self._chip
    foreseen = None if costs is None else costs.roofline
    if costs is None or foreseen is None or chip is None or len(self._times) < _LAST:
      return
    steps = [later - earlier for earlier, later in itertools.pairwise(self._times[_FIRST:])]
    measured = statistics.median(steps)
    loop.summaries.say(sentence(foreseen, measured))
    found = {
      'step': step,
      'measured_seconds': measured,
      'measured_steps': len(steps),
      'foreseen_seconds': foreseen.step,
      'chip': chip.name,
      'parts': dataclasses.asdict(foreseen),
      'kernels': dict(costs.kernel_seconds),
      'memory': self._memory(),
    }
    calibration = self._calibration(chip, [seconds / foreseen.step for seconds in steps])
    with contextlib.suppress(OSError):  # the line was printed
      write_file(self._folder / FILE, json.dumps(found, indent=2).encode())
      write_file(self._folder / step_calibration.FILE, calibration.text().encode())

  def _calibration(self, chip: Chip, ratios: list[float]) -> StepCalibration:
    """Returns what the next plan may know of the measured steps."""
    e, device = self._experiment, self._mesh.devices.flat[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method='inclusive')
    names = ('NUM_LAYERS', 'MODEL_DIMS', 'MAX_SEQ_LEN')
    shape = {name: value for name in names if isinstance(value := getattr(e, name, None), int)}
    shape |= {'rows': e.batch_size, 'devices': self._mesh.size}
    versions = compiled_step.versions(analysis.platform_of(device))
    versions |= {'paxlite': paxlite.__version__}
    return StepCalibration(
      chip.name, device.device_kind, middle, (low, high), len(ratios), type(e).__name__, shape,
      versions,
    )  # fmt: skip

  def _memory(self) -> dict[str, int]:
    """Returns the foreseen bytes of a device, and the most that were in use so far."""
    found = {'foreseen_bytes': self._bytes} if self._bytes else {}
    used = [(d.memory_stats() or {}).get('peak_bytes_in_use', 0) for d in self._mesh.local_devices]
    if most := max(used, default=0):
      found['measured_bytes'] = most
    return found


def sentence(foreseen: Roofline, measured: float) -> str:
  """Returns what was foreseen, by its parts, and what was measured."""
  parts = {
    'matmuls and attention': foreseen.compute_bound,
    'other kernels': foreseen.memory_bound,
    'collectives that nothing hides': foreseen.exposed,
    'copies from and to the host': foreseen.exposed_host,
  }
  named = ', '.join(f'{1e3 * seconds:.1f} of {name}' for name, seconds in parts.items() if seconds)
  return (
    f'A step takes {1e3 * measured:.1f} ms; {1e3 * foreseen.step:.1f} ms were foreseen ({named})'
  )
