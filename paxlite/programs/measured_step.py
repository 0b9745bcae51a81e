"""What the blocks of a model take of a step: by the program, and as a trace measures them."""

import contextlib
import dataclasses
import json
import logging
import pathlib
import re
import threading

import jax

from paxlite.aot import analysis
from paxlite.aot.chips import chip_of_kind
from paxlite.aot.costs import Costs
from paxlite.aot.hlo import Program
from paxlite.aot.roofline import speed_of
from paxlite.aot.step_blocks import blocks_of, traced_seconds
from paxlite.core.run_files import write_file
from paxlite.experiments.base import Experiment
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_state import TrainState

FILE = 'step_blocks.json'  # in a run's folder
_PATIENCE = 60.0  # seconds for which the end of a run waits for the file

log = logging.getLogger('paxlite')


class MeasuredStep(Callback):
  """Writes what each block of the model has taken of the steps that were traced.

  A thread reads the compiled program and the trace, which takes seconds for large models.

  Args:
    experiment: The experiment.
    mesh: Its mesh.
    folder: The run's folder, where `step_blocks.json` is written.
  """

  def __init__(self, experiment: Experiment, mesh: jax.sharding.Mesh, folder: pathlib.Path):
    self._experiment, self._mesh, self._folder = experiment, mesh, folder
    self._compiled: jax.stages.Compiled | None = None
    self._thread: threading.Thread | None = None

  def compiled(self, compiled: jax.stages.Compiled) -> None:
    """Takes the step's executable."""
    self._compiled = compiled

  def traced(self, folder: pathlib.Path, steps: int) -> None:
    """Reads a trace that is complete.

    Args:
      folder: The folder of the trace.
      steps: How many steps it has.
    """
    if self._compiled is not None:
      arguments = self._compiled, folder, steps
      self._thread = threading.Thread(target=self._read, args=arguments, daemon=True)
      self._thread.start()

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    if self._thread is not None:
      self._thread.join(timeout=_PATIENCE)

  def _read(self, compiled: jax.stages.Compiled, folder: pathlib.Path, steps: int) -> None:
    try:
      text = compiled.as_text() or ''
      name = re.match(r'HloModule ([^\s,]+)', text)
      measured = traced_seconds(folder, name[1], steps) if name else {}
      if not measured:
        log.debug('the trace names no instruction of the train step')
        return
      device = self._mesh.devices.flat[0]
      links, chip = (
        analysis.links_of(self._experiment, self._mesh),
        chip_of_kind(device.device_kind),
      )
      speed = None if chip is None else speed_of(chip, links)
      costs = Costs(Program(text), analysis.platform_of(device))
      blocks = blocks_of(costs, links.sizes, speed, measured)
    except Exception as e:  # a measurement is no reason to disturb a run
      log.debug('the trace was not read: %r', e)
      return
    found = {
      'steps': steps,
      'chip': None if chip is None else chip.name,
      'blocks': {name: dataclasses.asdict(block) for name, block in blocks.items()},
    }
    with contextlib.suppress(OSError):
      write_file(self._folder / FILE, json.dumps(found, indent=2).encode())
