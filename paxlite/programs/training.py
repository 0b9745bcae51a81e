"""Runs --mode=train."""

import contextlib
import os
import shlex
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite import extensions
from paxlite.cli import live_line
from paxlite.cli.terminal import has_color, say
from paxlite.compilation.compiled_step import check_options
from paxlite.core.errors import Interrupted, UserError
from paxlite.core.run_files import write_file
from paxlite.core.wording import amount
from paxlite.data import data_summary
from paxlite.data.base import RowInput
from paxlite.data.example_rows import ExampleRows
from paxlite.experiments.description import warnings
from paxlite.experiments.identity import write_configuration
from paxlite.files.folder_lock import FolderLock
from paxlite.parallel import devices
from paxlite.processes import join, preemption
from paxlite.processes.hosts import check_shared
from paxlite.processes.process_messages import meet
from paxlite.programs import kept_tokenizer
from paxlite.programs.agreement import compare_configs, compare_data, compare_folders
from paxlite.programs.first_start import (
  dated,
  in_steps,
  noting,
  with_policy,
  with_positions,
  with_tokenizer,
  with_warmup,
)
from paxlite.programs.run import Run
from paxlite.programs.run_checks import TRAINING
from paxlite.programs.run_folder import check_folder, holding, make_folder
from paxlite.tracking.writers import TrainRecords, read_records, started
from paxlite.training import goodput
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer


def train(run: Run) -> None:
  """Trains from the folder's checkpoint, if there is one, to MAX_STEPS, and prints a sample.

  NUM_EPOCHS of the experiment replaces MAX_STEPS.

  Raises:
    Interrupted: SIGINT (Ctrl-C, or a notebook's stop), SIGTERM or SIGHUP arrived. The state is
      saved, and the same call continues the run. The caller's signal handlers are restored.
  """
  with preemption.listening(saves=run.save), holding(run) as (held, lock):
    if held.own_disks and held.experiment.LOSS_SPIKE_FACTOR:
      raise UserError(
        'LOSS_SPIKE_FACTOR needs a folder that all processes share, but each has its own: '
        '--local_dir on a shared disk, or LOSS_SPIKE_FACTOR=0'
      )
    _train(held, lock)


def _train(run: Run, lock: FolderLock) -> None:
  spent = goodput.Goodput(run.folder if jax.process_index() == 0 else None)
  with run.watchdog(spent) as watchdog:
    watchdog.pause()  # before each wait for others, so that they are named if they do not come
    compare_configs(run)
    compare_folders(run)
    run = with_warmup(with_positions(in_steps(dated(with_tokenizer(run)))))
    check_folder(run)
    _lock(lock, run)
    run = with_policy(run, watchdog.pause)
    with live_line.working('Reading the training data', _say):
      trainer = run.trainer(watchdog)
      watchdog.pause()
      compare_data(run, trainer)
    watchdog.pause()
    _train_watched(noting(run, trainer.data.input), lock, trainer)


def _about_data(trainer: Trainer) -> list[str]:
  """Returns lines on the training data; of a new fine-tuning run, also on single examples."""
  data = trainer.data.input
  lines = data_summary.lines(data)
  is_new = not trainer.store.checkpoints.steps()
  if is_new and isinstance(data, RowInput) and isinstance(data.source, ExampleRows):
    lines += data_summary.first_look(data.source, has_color())
  return lines


def _train_watched(run: Run, lock: FolderLock, trainer: Trainer) -> None:
  task = trainer.store.task
  if run.compiled_step is None:
    check_options(trainer.compiler.options)
  make_folder(run.folder)
  _lock(lock, run)
  if run.address is None:
    check_shared(run.folder)
  if jax.process_index() == 0:
    say(f'Devices: {devices.described()}')
    say(f'Backend: {run.experiment.backend}')
    of_callbacks = (line for callback in trainer.callbacks for line in callback.start_lines())
    of_experiment = warnings(run.experiment, task.task, task.abstract)
    of_attention = run.experiment.attention_choices(task.mesh.local_devices[0])
    # where rows are split over context, those of the experiment say how attention is computed
    lines = *_about_data(trainer), *of_experiment, *of_attention, *of_callbacks
    for line in dict.fromkeys(lines):
      say(line)
    if run.experiment.NUM_EPOCHS is not None:
      steps = run.experiment.MAX_STEPS
      say(f'NUM_EPOCHS={run.experiment.NUM_EPOCHS:g}: training ends with step {steps:,}')
    if trainer.compiler.options:
      options = ' '.join(f'{k}={v}' for k, v in sorted(trainer.compiler.options.items()))
      say(f'XLA: {options}')
  trainer.watchdog.pause()
  inputs = {TRAINING: trainer.data.input, **trainer.evaluator.inputs}
  for complete in extensions.added('inputs'):
    complete(run, inputs, trainer.watchdog.beat)
  meet()  # before programs that initialize or restore
  trainable, _ = task.task.optimizer.split(task.abstract.params)
  trainer.compiler.memory.state(task.abstract, trainable)
  with _tracked(trainer):
    state = _trained(run, trainer)
  for callback in trainer.callbacks:
    callback.after_training(state)
  if jax.process_index() == 0:
    say(f'Logs, metrics and checkpoints are in {run.place}')


@contextlib.contextmanager
def _tracked(trainer: Trainer) -> Iterator[None]:
  """A context in which the trackers of process 0 have started; UserError if one cannot."""
  steps = trainer.store.checkpoints.steps()
  if jax.process_index() or (steps and trainer.is_complete(steps[-1])):
    yield
    return
  with contextlib.ExitStack() as stack:
    with join.leaving_together(), live_line.working('Starting the trackers', _say):
      stack.enter_context(started(trainer.trackers))
    yield


def _trained(run: Run, trainer: Trainer) -> TrainState:
  """Restores or makes the state of a run, and trains it to its last step."""
  begins = not trainer.store.checkpoints.steps()
  with (
    join.leaving_together(),
    trainer.goodput.spent_on('restore'),
    live_line.working('Restoring, or making initial values', _say),
  ):
    state, step = trainer.store.initial()
    if not trainer.is_complete(step):
      trainer.resume(step)
    _say_what_records_lack(run, step)
  trainer.watchdog.pause()
  if begins and not trainer.store.is_local(step):
    for plan in filter(None, (trainer.store.plan, trainer.store.reference_plan)):
      _say(plan.table())
  # Only now is it known that the folder's checkpoint fits.
  write_configuration(run.experiment, run.folder)
  kept_tokenizer.keep(run.experiment, run.folder)
  if run.command and jax.process_index() == 0:
    command = f'cd {shlex.quote(os.getcwd())}\n{run.command}\n'
    write_file(run.folder / 'command.txt', command.encode('utf-8', 'replace'))
  preemption.check()
  try:
    return trainer.train(state, step)
  finally:
    _print_goodput(run)


def _say_what_records_lack(run: Run, start: int) -> None:
  """Reports if the run's records and state end at different steps."""
  records = run.folder / TrainRecords.name
  if jax.process_index() != 0 or not (steps := [r['step'] for r in read_records(records)]):
    return
  if start == 0:
    done = amount(max(steps), 'step')
    say(f'No state of the {done} in {records.name} was saved: training starts from the beginning')
  before = [0, 0, *sorted({s for s in steps if s <= start})]
  usual = max(run.experiment.SUMMARY_INTERVAL_STEPS, before[-1] - before[-2])
  first = before[-1] + 1
  if start - before[-1] >= usual:
    lost = (
      f'step {start:,}: it was' if first == start else f'steps {first:,} to {start:,}: they were'
    )
    say(f'{records.name} has no record of {lost} lost')


def _say(text: str) -> None:
  if jax.process_index() == 0:
    say(text)


def _lock(lock: FolderLock, run: Run) -> None:
  """Takes the lock in process 0 for all processes; all raise UserError if that fails."""
  problem: Exception | None = None
  if jax.process_index() == 0:
    try:
      lock.acquire()
    except (UserError, Interrupted) as e:
      problem = e
  if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(bool(problem))):
    problem = problem or UserError(f'--job_log_dir={run.place} is in use, as process 0 reports')
  if problem is not None:
    raise problem


def _print_goodput(run: Run) -> None:
  report = goodput.report(run.folder)
  if report is not None and jax.process_index() == 0:
    say(report.line())
