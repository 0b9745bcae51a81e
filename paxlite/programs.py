"""What `paxlite.main` does with an experiment: train, evaluate, decode, or a dry run."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite import devices, distributed, goodput, partitioning, preemption
from paxlite.checkpoint_source import find_source, tokenizer_of
from paxlite.checkpoints import Checkpoints
from paxlite.compiled_step import SavedStep, check_options
from paxlite.configuration import (
  is_of,
  refuse_other_experiment,
  refuse_other_model,
  write_configuration,
)
from paxlite.errors import Interrupted, UserError
from paxlite.evaluation import Evaluator
from paxlite.experiment import Experiment
from paxlite.experiments.backend import PLAIN_XLA
from paxlite.folder_lock import FolderLock
from paxlite.goodput import Goodput
from paxlite.inputs import about
from paxlite.inputs.base import Input
from paxlite.inputs.tokenizer import Tokenizer, open_tokenizer
from paxlite.memory_check import MemoryCheck
from paxlite.mesh_check import check_mesh
from paxlite.optimizers import path_name
from paxlite.peers import Peers
from paxlite.restoring import Restore
from paxlite.save_times import SaveTimes
from paxlite.saving import Saver
from paxlite.spikes import SpikeDetector
from paxlite.states import States
from paxlite.summaries import Summaries
from paxlite.terminal import say
from paxlite.trainer import Trainer
from paxlite.watchdog import Limits, Watchdog

if TYPE_CHECKING:
  from paxlite.inference import Inference


@dataclasses.dataclass(frozen=True)
class Run:
  """An experiment and where it runs.

  Attributes:
    experiment: Validated numbers.
    folder: job_log_dir.
    save: Whether training writes checkpoints; it continues from those that are there either way.
    accept_changes: Whether a folder of a different experiment, or data, may be continued.
    start_over: Whether it may begin again where the folder's checkpoints are all damaged.
    read_only: Whether what the folder holds stays as it is.
    compiled_step: A file of tools.compile to load instead of compiling.
    check_memory: Whether what needs more memory than there is gets refused.
    peers: The other processes of the run.
  """

  experiment: Experiment
  folder: pathlib.Path
  save: bool = True
  accept_changes: bool = False
  start_over: bool = False
  read_only: bool = False
  compiled_step: pathlib.Path | None = None
  check_memory: bool = True
  peers: Peers = dataclasses.field(default_factory=Peers)

  def trainer(self, spent: Goodput | None = None, watchdog: Watchdog | None = None) -> Trainer:
    """Builds everything; raises UserError before a file is written or a program compiled.

    Args:
      spent: Notes what time is spent on.
      watchdog: Ends a run that hangs.
    """
    e = self.experiment
    spent = spent or Goodput(None)
    inputs = e.train_input(), e.eval_inputs()  # configs only, but a missing dataset is said first
    mesh = e.mesh()
    states = self.states(mesh)
    data = fdl.build(inputs[0])
    states.batch_size = data.batch_size
    eval_data = {name: fdl.build(cfg) for name, cfg in inputs[1].items()}
    _check_vocabulary(e, {'training': data, **eval_data})
    _check_eval_batches(e, eval_data)
    options = e.compiler_options(mesh.devices.flat[0].platform)
    step = self.compiled_step
    saved = None if step is None else SavedStep(step, e.values(), options)
    if saved is not None:
      saved.check(mesh)
    trainer = Trainer(
      task=states.task,
      mesh=mesh,
      rules=e.rules,
      saver=Saver(
        states, data, self.save, e.STOP_ON_FAILED_SAVE, e.MAX_ROLLBACKS, self.accept_changes
      ),
      data=data,
      eval_data=eval_data,
      folder=self.folder,
      seed=e.SEED,
      seq_len=e.MAX_SEQ_LEN,
      max_steps=e.MAX_STEPS,
      summary_interval=e.SUMMARY_INTERVAL_STEPS,
      eval_interval=e.EVAL_INTERVAL_STEPS,
      save_times=SaveTimes(e.CHECKPOINT_EVERY_N_STEPS, 60 * e.CHECKPOINT_EVERY_N_MINUTES),
      flops_per_token=e.flops_per_token,
      goodput=spent,
      watchdog=watchdog or self.watchdog(spent),
      memory=MemoryCheck(mesh, self.check_memory),
      spikes=(
        SpikeDetector(e.LOSS_SPIKE_FACTOR, e.LOSS_SPIKE_WINDOW) if e.LOSS_SPIKE_FACTOR else None
      ),
      profiler_step=e.PROFILER_CAPTURE_STEP,
      profiler_steps=e.PROFILER_NUM_STEPS,
      compiler_options=options,
      saved_step=saved,
    )
    _check_trainable(trainer)
    return trainer

  def states(self, mesh: Any) -> States:
    """Raises UserError where another checkpoint, that the run starts from, does not fit."""
    e = self.experiment
    states = States(
      task=fdl.build(e.training_task()),
      mesh=mesh,
      rules=e.rules,
      checkpoints=self.checkpoints(),
      seed=e.SEED,
      batch_size=e.batch_size,
      restore=e.restore,
      trainable_only=e.saves_trainable_only,
      start_over=self.start_over,
    )
    states.plan  # noqa: B018 - read here, before data is, which takes its time
    return states

  def evaluator(self, beat: Callable[[], None]) -> tuple[States, Evaluator]:
    """What evaluates the run; the data that it trains on is neither needed nor read.

    Args:
      beat: Called after each batch.
    """
    e = self.experiment
    inputs = e.eval_inputs()
    if not inputs:
      raise UserError(
        f'{type(e).__name__} has no evaluation input'
        + (': --fdl.EVAL_FILES names one' if hasattr(e, 'EVAL_FILES') else '')
      )
    mesh = e.mesh()
    states = self.states(mesh)
    data = {name: fdl.build(cfg) for name, cfg in inputs.items()}
    _check_vocabulary(e, data)
    _check_eval_batches(e, data)
    return states, Evaluator(states.task, mesh, e.rules, data, beat)

  def watchdog(self, goodput: Goodput) -> Watchdog:
    e = self.experiment
    limits = Limits(e.STEP_TIMEOUT, e.PHASE_TIMEOUT, e.STACK_TRACE_INTERVAL)
    return Watchdog(self.folder, limits, goodput, self.peers)

  def check_folder(self) -> None:
    """Raises UserError when the folder's checkpoints are those of a different experiment."""
    if not self.accept_changes and self.checkpoints().steps():
      refuse_other_experiment(self.experiment, self.folder)

  def check_evaluated(self) -> None:
    """Raises UserError when the folder's checkpoints are those of another experiment or model.

    Numbers that neither the model nor its backend depends on may be others than in training.
    """
    if not self.accept_changes and self.checkpoints().steps():
      refuse_other_model(self.experiment, self.folder, also=PLAIN_XLA)
      if not is_of(self.experiment, self.folder):
        refuse_other_experiment(self.experiment, self.folder)

  def checkpoints(self) -> Checkpoints:
    keep = self.experiment.CHECKPOINT_MAX_TO_KEEP
    return Checkpoints(self.folder / 'checkpoints', keep, read_only=self.read_only)

  def tokenizer(self) -> Tokenizer | None:
    """What a sample at the end of training needs; None where none is asked for."""
    if getattr(self.experiment, 'SAMPLE_PROMPT', None) is None:
      return None
    vocab = getattr(self.experiment, 'VOCAB_PATH', '')
    return open_tokenizer(vocab or str(tokenizer_of(self.experiment.CHECKPOINT_RESTORE_PATH) or ''))


def train(run: Run) -> None:
  """Trains to MAX_STEPS, continuing what the folder holds, and prints a sample.

  Raises:
    Interrupted: SIGINT (Ctrl-C, or a notebook's stop), SIGTERM or SIGHUP came; what was trained is
      saved, and the same call goes on. Handlers of the caller's are back then.
  """
  lock = FolderLock(run.folder)
  with preemption.listening(saves=run.save):
    try:
      _train(run, lock)
    finally:
      lock.release()  # a notebook lives on


def _train(run: Run, lock: FolderLock) -> None:
  spent = Goodput(run.folder if jax.process_index() == 0 else None)
  with run.watchdog(spent) as watchdog:
    run.check_folder()
    _lock(lock, run)
    trainer = run.trainer(spent, watchdog)
    watchdog.pause()
    _train_watched(run, lock, trainer)


def _train_watched(run: Run, lock: FolderLock, trainer: Trainer) -> None:
  tokenizer = run.tokenizer()
  check_mesh(trainer.mesh, trainer.rules)
  if run.compiled_step is None:
    check_options(trainer.compiler_options)
  make_folder(run.folder)
  _lock(lock, run)
  if jax.process_index() == 0:
    say(f'Devices: {devices.described()}')
    say(f'Backend: {run.experiment.backend}')
    for line in (*about.lines(trainer.data), *run.experiment.remarks):
      say(line)
    if trainer.compiler_options:
      told = ' '.join(f'{k}={v}' for k, v in sorted(trainer.compiler_options.items()))
      say(f'XLA: {told}')
  abstract = trainer.states.abstract
  trainer.memory.state(abstract, trainer.task.optimizer.split(abstract.params)[0])
  with distributed.leaving_together(), trainer.goodput.spent_on('restore'):
    state, step = trainer.states.initial()
    if step < run.experiment.MAX_STEPS or trainer.saver.evaluation_is_due(step):
      trainer.saver.resume(step)
  trainer.watchdog.pause()
  if trainer.states.plan is not None and jax.process_index() == 0:
    say(trainer.states.plan.table())
  write_configuration(
    run.experiment, run.folder
  )  # not before it is known that the folder's checkpoint fits
  preemption.check()
  try:
    state = trainer.train(state, step)
  finally:
    _print_goodput(run)
  e: Any = run.experiment
  if tokenizer is not None and getattr(e, 'USE_TE', 'off') == 'layer':
    say("No sample: Transformer Engine's layers keep no keys and values")
  elif tokenizer is not None and jax.process_count() == 1:
    text = _sample(e, trainer, state.params, tokenizer)
    say(f'\nA sample, continuing {e.SAMPLE_PROMPT!r}:\n{text}\n')
  if jax.process_index() == 0:
    say(f'Logs, metrics and checkpoints are in {run.folder}')


def evaluate(run: Run) -> None:
  """Evaluates the last good checkpoint on every evaluation input, and on EVAL_TASKS."""
  run = dataclasses.replace(run, read_only=True)
  e = run.experiment
  if not run.checkpoints().steps() and e.restore is None:
    raise UserError(
      f'{run.folder} holds no checkpoint to evaluate: train first, or name weights '
      'with --fdl.CHECKPOINT_RESTORE_PATH'
    )
  tasks = getattr(e, 'EVAL_TASKS', [])
  if tasks:
    if run.checkpoints().steps():
      refuse_other_model(e, run.folder)
    evaluate_zero_shot(run, tasks)
    if not e.eval_inputs():
      return
  run.check_evaluated()
  spent = Goodput(None)
  watchdog = run.watchdog(spent)
  with watchdog:
    states, evaluator = run.evaluator(watchdog.beat)
    watchdog.pause()
    check_mesh(states.mesh, states.rules)
    make_folder(run.folder)
    say(f'Devices: {devices.described()}')
    say(f'Backend: {e.backend}')
    MemoryCheck(states.mesh, run.check_memory).state(states.abstract, ())
    with spent.spent_on('restore'):
      state, step = states.last()
    summaries = Summaries(run.folder, max_steps=step)
    spent.switch('evaluation')
    try:
      evaluator.report(state, step, summaries)
    finally:
      summaries.close()


def evaluate_zero_shot(run: Run, names: Sequence[str]) -> None:
  """Evaluates on the tasks of these names; prints tables and writes summaries."""
  from paxlite import eval_tasks, zero_shot

  e: Any = run.experiment
  tasks = eval_tasks.read_tasks(
    names,
    skip_unreadable=e.EVAL_SKIP_UNREADABLE,
    tfds_data_dir=getattr(e, 'TFDS_DATA_DIR', ''),
  )
  inference, step = load(run)
  evaluate = zero_shot.ZeroShot(inference, e.EVAL_BATCH_TOKENS, e.EVAL_TOO_LONG)
  make_folder(run.folder)
  summaries = Summaries(run.folder, max_steps=step or 0)
  try:
    for task in tasks:
      result = evaluate(task)
      values = {k: m.value for k, m in result.metrics.items()}
      values |= {f'{k}_stderr': m.stderr for k, m in result.metrics.items()}
      summaries.result(step or 0, task.name, values, result.line())
  finally:
    summaries.close()


def load(run: Run) -> tuple['Inference', int | None]:
  """The model with the last good checkpoint, and its step; or with restored weights, and None."""
  from paxlite import inference

  e: Any = run.experiment
  own = bool(run.checkpoints().steps())
  restore = Restore(str(run.folder)) if own else e.restore
  if restore is None:
    raise UserError(
      f'{run.folder} holds no checkpoint: train first, or name weights '
      'with --fdl.CHECKPOINT_RESTORE_PATH'
    )
  source = find_source(restore.path)
  vocab = getattr(e, 'VOCAB_PATH', '') or os.environ.get('VOCAB_PATH', '')
  loaded = inference.load(e, source, restore, vocab)
  return loaded, int(source.folder.name.rpartition('_')[2]) if own else None


def decode(run: Run) -> None:
  """Continues the prompts of DECODE_FILES with the last good checkpoint, or restored weights."""
  from paxlite import inference

  e: Any = run.experiment
  if not e.DECODE_FILES:
    raise UserError('--fdl.DECODE_FILES=/path/to/prompts.jsonl is missing')
  run.check_evaluated()
  loaded, step = load(run)
  prompts = inference.read_prompts(e.DECODE_FILES, loaded)
  make_folder(run.folder)
  name = 'restored' if step is None else f'{step:08d}'
  output = run.folder / f'decoded_{name}.jsonl'
  count = inference.decode_file(loaded, prompts, output)
  say(f'{output}: {len(prompts):,} prompts continued, {count:,} of them now')


def make_folder(folder: pathlib.Path) -> None:
  """Makes job_log_dir; raises UserError where it cannot be made or written."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # without a name that other processes could take
      pass
  except OSError as e:
    raise UserError(f'--job_log_dir={folder} cannot be written: {e.strerror or e}') from None


def _lock(lock: FolderLock, run: Run) -> None:
  """Process 0 takes the lock for all of them; all raise UserError where it cannot."""
  problem: Exception | None = None
  if jax.process_index() == 0:
    try:
      lock.acquire()
    except (UserError, Interrupted) as e:
      problem = e
  if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(bool(problem))):
    problem = problem or UserError(f'--job_log_dir={run.folder} is in use, as process 0 says')
  if problem is not None:
    raise problem


def _print_goodput(run: Run) -> None:
  report = goodput.report(run.folder)
  if report is not None and jax.process_index() == 0:
    say(report.line())


def _sample(e: Any, trainer: Trainer, params: Any, tokenizer: Tokenizer) -> str:
  """Continues the experiment's prompt by up to 100 tokens."""
  from paxlite.decoding import Generator, Sampling
  from paxlite.inference import eos_ids, start_ids

  start = start_ids(e, tokenizer)
  prompt = (start + tokenizer.encode(e.SAMPLE_PROMPT))[: e.MAX_SEQ_LEN - 1]
  generator = Generator(
    fdl.build(e.task()).model,
    params,
    e.MAX_SEQ_LEN,
    Sampling(temperature=0.8),
    eos_ids=eos_ids(e, tokenizer),
    vocab_size=tokenizer.vocab_size,
    mesh=trainer.mesh,
    rules=trainer.rules,
  )
  return tokenizer.decode(prompt[len(start) :] + generator.generate([prompt], 100)[0])


def _check_vocabulary(e: Experiment, inputs: dict[str, Input]) -> None:
  vocab_size = getattr(e, 'VOCAB_SIZE', None)
  for name, data in inputs.items():
    if vocab_size is not None and data.max_token_id >= vocab_size:
      raise UserError(
        f'the {name} data {data.name} has token id {data.max_token_id} and VOCAB_SIZE is '
        f'{vocab_size}: '
        f'--fdl.VOCAB_SIZE={-(-(data.max_token_id + 1) // 128) * 128} or another dataset'
      )


def _check_trainable(trainer: Trainer) -> None:
  params = trainer.states.abstract.params
  optimizer = trainer.task.optimizer
  if not jax.tree.leaves(optimizer.split(params)[0]):
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    raise UserError(
      f'TRAINABLE_VARIABLES={list(optimizer.trainable)} matches no variable as a whole; '
      f'there are {", ".join(names[:3])} …'
    )


def _check_eval_batches(e: Experiment, inputs: dict[str, Input]) -> None:
  for name, data in inputs.items():
    if data.batch_size % e.batch_shards:
      axes = ' × '.join(partitioning.axes_of(e.rules['batch']))
      raise UserError(
        f'EVAL_BATCH_SIZE={data.batch_size} ({name}) is not divisible by {axes} = {e.batch_shards}'
      )
