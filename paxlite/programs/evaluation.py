"""Runs --mode=eval, which evaluates a checkpoint."""

import dataclasses
import logging
import pathlib
import shlex
import tempfile
from collections.abc import Callable

import fiddle as fdl
import jax

from paxlite import extensions
from paxlite.cli.terminal import say
from paxlite.core.errors import UserError
from paxlite.data.fingerprints import changes_of_evaluations, identity
from paxlite.experiments.language_model import LanguageModel
from paxlite.parallel import devices
from paxlite.programs.agreement import compare_configs
from paxlite.programs.first_start import as_begun
from paxlite.programs.run import Run
from paxlite.programs.run_checks import check_inputs
from paxlite.programs.run_folder import (
  check_evaluated,
  check_model,
  check_present,
  holding,
  holds_weights,
  make_folder,
)
from paxlite.programs.weights_model import restore_of
from paxlite.tracking.summaries import Summaries
from paxlite.training.evaluation import Evaluator
from paxlite.training.goodput import Goodput
from paxlite.training.memory_check import MemoryCheck
from paxlite.training.state_store import StateStore

log = logging.getLogger('paxlite')


def evaluate(run: Run, before: bool = False) -> None:
  """Evaluates the last good checkpoint, or restored weights, on all inputs and on EVAL_TASKS.

  Raises UserError if there is nothing to evaluate.

  Args:
    before: Whether the weights that the run began with are evaluated too. Their metrics are
      printed, and not kept.
  """
  if holds_weights(run):
    where = shlex.quote(str(run.place))
    raise UserError(
      f'{run.place} holds weights, not a run: paxlite zero-shot {where} --tasks=task.json '
      'evaluates them on a task. To evaluate them on documents, use an experiment that starts '
      f'from them, such as HuggingFaceSFT with CHECKPOINT_RESTORE_PATH={where} and EVAL_FILES '
      '(docs/evaluation.md)'
    )
  with holding(run, deletes=False) as (held, _):
    held = dataclasses.replace(as_begun(held), read_only=True)
    if before:
      _evaluate_before(held)
    _evaluate(held)


def _evaluate_before(run: Run) -> None:
  path = run.experiment.CHECKPOINT_RESTORE_PATH
  if not path or not run.checkpoints().steps():
    why = 'holds no checkpoint' if path else 'began without weights'
    raise UserError(f'--before: {run.place} {why}, so before and after are the same')
  check_evaluated(run)
  say(f'Before, {path}:')
  with tempfile.TemporaryDirectory() as folder:
    _evaluate(dataclasses.replace(run, folder=pathlib.Path(folder), address=None))
  say(f'After, {run.place}:')


def _evaluate(run: Run) -> None:
  e = run.experiment
  compare_configs(run)
  check_present(run)
  if not run.checkpoints().steps() and restore_of(run.experiment) is None:
    raise UserError(
      f'{run.place} holds no checkpoint to evaluate: train first, or name weights with '
      'CHECKPOINT_RESTORE_PATH'
    )
  if tasks := e.EVAL_TASKS if isinstance(e, LanguageModel) else []:
    if run.checkpoints().steps():
      check_model(run)
    extensions.hook('EVAL_TASKS')(run, tasks)
    if not e.eval_inputs():
      return
  check_evaluated(run)
  spent = Goodput(None)
  watchdog = run.watchdog(spent)
  with watchdog:
    store, evaluator = _evaluator(run, watchdog.beat)
    watchdog.pause()
    make_folder(run.folder)
    say(f'Devices: {devices.described()}')
    say(f'Backend: {e.backend}')
    for complete in extensions.added('inputs'):
      complete(run, evaluator.inputs, watchdog.beat)
    MemoryCheck(store.task.mesh, run.check_memory).state(store.task.abstract, ())
    with spent.spent_on('restore'):
      state, step = store.last()
    if jax.process_index() == 0:
      now = {name: identity(data) for name, data in evaluator.inputs.items()}
      for line in changes_of_evaluations(now, store.metadata(step)):
        log.warning('%s', line)
    summaries = Summaries(run.folder, max_steps=step)
    spent.switch('evaluation')
    try:
      evaluator.report(state, step, summaries)
    finally:
      summaries.close()


def _evaluator(run: Run, beat: Callable[[], None]) -> tuple[StateStore, Evaluator]:
  """Returns the states of the run and an evaluator; training data is not read.

  Args:
    beat: Called after each batch.
  """
  e = run.experiment
  inputs = e.eval_inputs()
  if not inputs:
    names = [f': {n} names one' for n in ('EVAL_FILES', 'EVAL_SOURCES') if n in e.values()]
    raise UserError(f'{type(e).__name__} has no evaluation input{"".join(names)}')
  store = run.store()
  data = {name: fdl.build(cfg) for name, cfg in inputs.items()}
  check_inputs(e, data)
  return store, Evaluator(store.task, data, beat, e.max_segments_per_seq)
