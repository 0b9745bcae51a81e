"""The parts of a trainer that are made of its experiment alone."""

import functools
import pathlib
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from paxlite.compilation.compiled_step import SavedStep
from paxlite.core.errors import UserError
from paxlite.data.base import Input
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import former_files
from paxlite.parallel.devices import peak_flops
from paxlite.programs import kept_tokenizer, run_checks
from paxlite.training.best import Best
from paxlite.training.callbacks import Callback
from paxlite.training.loss_alarm import LossAlarm
from paxlite.training.memory_check import MemoryCheck
from paxlite.training.profiling import StepProfiler
from paxlite.training.reporting import Throughput
from paxlite.training.save_times import SaveTimes
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.spikes import SpikeDetector
from paxlite.training.step_compiler import StepCompiler
from paxlite.training.train_data import TrainData
from paxlite.training.trainer import Intervals, Trainer


def schedule(e: Experiment) -> Intervals:
  """Returns the steps after which the loop reports, evaluates and saves."""
  times = SaveTimes(e.CHECKPOINT_EVERY_N_STEPS, 60 * e.CHECKPOINT_EVERY_N_MINUTES)
  return Intervals(e.MAX_STEPS, e.SUMMARY_INTERVAL_STEPS, e.EVAL_INTERVAL_STEPS, times)


def train_data(
  e: Experiment,
  data: Input,
  eval_data: Mapping[str, Input],
  folder: pathlib.Path,
  accepts_changes: bool,
) -> TrainData:
  """Returns the training data with what a run in this folder knows of them."""
  former = '' if accepts_changes else former_files(e, folder)
  encoding = functools.partial(kept_tokenizer.changes, e, folder)
  return TrainData(data, accepts_changes, e.max_segments_per_seq, eval_data, former, encoding)


def throughput(e: Experiment, task: ShardedTask, batch_size: int) -> Throughput:
  """Returns what turns seconds per step into speeds."""
  tokens = batch_size * e.MAX_SEQ_LEN
  of_token = e.trained_flops(task.task.optimizer, task.boxed_params)
  peak = peak_flops(task.mesh.devices.flat[0].device_kind)
  return Throughput(tokens, tokens * of_token / task.mesh.size, peak)


def compiler(
  e: Experiment,
  mesh: Mesh,
  beat: Callable[[], None],
  checks_memory: bool = True,
  compiled_step: pathlib.Path | None = None,
) -> StepCompiler:
  """Returns what compiles the step, or loads a file of `paxlite compile`.

  Raises UserError if the compiled step is for another mesh or machine.
  """
  options = e.compiler_options(mesh.devices.flat[0].platform)
  memory = MemoryCheck(mesh, checks_memory)
  if compiled_step is None:
    return StepCompiler(memory, options, beat=beat)
  saved = SavedStep(compiled_step, e.values(), options)
  saved.check(mesh)
  return StepCompiler(memory, options, saved, beat)


def callbacks(e: Experiment, trainer: Trainer, own_disks: bool) -> list[Callback]:
  """Returns what is called at the events of the loop; the class Callback states the order.

  Args:
    trainer: Its trainer, whose other parts are there.
    own_disks: Whether each process has a disk of its own.
  """
  best = _best(e, trainer, own_disks)
  factor, window = e.LOSS_SPIKE_FACTOR, e.LOSS_SPIKE_WINDOW
  first, count, folder = e.PROFILER_CAPTURE_STEP, e.PROFILER_NUM_STEPS, trainer.folder / 'profile'
  return [
    *([SpikeDetector(factor, window)] if factor else []), *([best] if best else []), *e.callbacks(),
    StepProfiler(folder, first, count, e.MAX_STEPS), LossAlarm(),
  ]  # fmt: skip


def _best(e: Experiment, trainer: Trainer, own_disks: bool) -> Best | None:
  """Returns what keeps the best checkpoint; UserError if there is nothing to evaluate."""
  if not e.KEEP_BEST and not e.EARLY_STOPPING_PATIENCE:
    return None
  inputs, task = trainer.evaluator.inputs, trainer.store.task.task
  if not inputs:
    raise UserError(
      f'{type(e).__name__} has no evaluation input: without one, KEEP_BEST and '
      'EARLY_STOPPING_PATIENCE have nothing to compare'
    )
  name, patience = next(iter(inputs)), e.EARLY_STOPPING_PATIENCE
  metric = e.BEST_METRIC
  run_checks.check_best_metric(metric, task.losses)
  return Best(
    trainer.folder, name, metric, e.KEEP_BEST, patience, own_disks, store=trainer.store,
    larger=task.larger_is_better(metric),
  )  # fmt: skip
