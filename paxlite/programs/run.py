"""A run: an experiment, its folder, and the objects that are built from them."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

import fiddle as fdl
from jax.sharding import Mesh

from paxlite import extensions
from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.checkpointing.folders import refuse_dangling
from paxlite.checkpointing.restore import Restore
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.compilation.compiled_step import SavedStep
from paxlite.config.attribute_kinds import Kind
from paxlite.config.experiment_file import EXPERIMENT
from paxlite.core.errors import UserError
from paxlite.data.base import Input
from paxlite.experiments.base import Experiment
from paxlite.experiments.code_changes import changes, refuse_other_code
from paxlite.experiments.compatibility import check_function
from paxlite.experiments.epochs import max_steps
from paxlite.experiments.identity import (
  former_files,
  is_of,
  refuse_other_experiment,
  refuse_other_model,
  run_values,
)
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.objective import Objective
from paxlite.files.folder_lock import FolderLock
from paxlite.files.schemes import scheme_of
from paxlite.parallel.devices import peak_flops
from paxlite.processes import preemption
from paxlite.processes.peers import Peers
from paxlite.programs import run_checks
from paxlite.programs.weights_model import knowing_weights
from paxlite.training.best import Best
from paxlite.training.callbacks import Callback
from paxlite.training.evaluation import Evaluator
from paxlite.training.goodput import Goodput
from paxlite.training.memory_check import MemoryCheck
from paxlite.training.profiling import StepProfiler
from paxlite.training.reporting import Throughput
from paxlite.training.save_times import SaveTimes
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.spikes import Rollbacks, SpikeDetector
from paxlite.training.state_store import StateStore
from paxlite.training.step_compiler import StepCompiler
from paxlite.training.train_data import TrainData
from paxlite.training.trainer import Intervals, Trainer
from paxlite.training.watchdog import Limits, Watchdog

TRAINING = 'training'  # the name of the training data among the inputs


@dataclasses.dataclass(frozen=True)
class Run:
  """An experiment and the folder that it runs in.

  Attributes:
    experiment: The experiment, validated.
    folder: The folder job_log_dir, or the one on this machine where that is in an object store.
    save: Whether training writes checkpoints; it continues from existing ones in both cases.
    accept_changes: Whether the folder of another experiment, or of other data, may be continued.
    start_over: Whether training may start from the beginning if all checkpoints are damaged.
    read_only: Whether the folder must stay unchanged.
    compiled_step: A file of `paxlite compile` to load instead of compiling.
    check_memory: Whether to refuse a program that needs more memory than the devices have.
    peers: The other processes of the run.
    data: The training data, if they have been read already.
    address: The job_log_dir, if it is an address.
    own_disks: Whether each process has its own folder on this machine for it.
    command: The command that started it, which its folder keeps; '': there is none.
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
  data: Input | None = None
  address: str | None = None
  own_disks: bool = False
  command: str = ''

  def __post_init__(self) -> None:
    object.__setattr__(self, 'experiment', knowing_weights(self.experiment))

  @property
  def place(self) -> str | pathlib.Path:
    """The job_log_dir, for messages."""
    return self.address or self.folder

  def in_steps(self) -> 'Run':
    """Returns the run with the MAX_STEPS that NUM_EPOCHS means, and so with its whole schedule.

    A run that continues keeps the number that it began with. Otherwise the training data are read,
    before anything is written or compiled. Without NUM_EPOCHS, the run is returned as it is.

    Raises:
      UserError: The number of rows is not known.
    """
    e = self.experiment
    if e.NUM_EPOCHS is None:
      return self
    before = run_values(self.folder) if self.checkpoints().steps() else None
    values = before['values'] if before else {}
    if values.get('NUM_EPOCHS') == e.NUM_EPOCHS and 'MAX_STEPS' in values:
      return dataclasses.replace(self, experiment=e.replaced(MAX_STEPS=values['MAX_STEPS']))
    data = fdl.build(e.train_input())
    counted = e.replaced(MAX_STEPS=max_steps(e, data))
    counted.validate()
    return dataclasses.replace(self, experiment=counted, data=data)

  def trainer(self, spent: Goodput | None = None, watchdog: Watchdog | None = None) -> Trainer:
    """Builds the trainer; raises UserError before a file is written or a program is compiled.

    Args:
      spent: Records how the time is spent.
      watchdog: Ends a run that hangs.
    """
    e = self.experiment
    spent = spent or Goodput(None)
    inputs = e.train_input(), e.eval_inputs()  # only configs, to report a missing dataset first
    store = self.store()
    data = fdl.build(inputs[0]) if self.data is None else self.data
    store.batch_size = data.batch_size
    eval_data = {name: fdl.build(cfg) for name, cfg in inputs[1].items()}
    run_checks.check_vocabulary(e, {TRAINING: data, **eval_data})
    run_checks.check_eval_batches(e, eval_data)
    run_checks.check_examples(e, {TRAINING: data, **eval_data})
    store.task.task.optimizer.check(store.task.abstract.params)
    run_checks.check_reference_tokenizer(e)
    watchdog = watchdog or self.watchdog(spent)
    former = '' if self.accept_changes else former_files(e, self.folder)
    train_data = TrainData(data, self.accept_changes, e.max_segments_per_seq, eval_data, former)
    trainer = Trainer(
      store=store,
      data=train_data,
      evaluator=Evaluator(
        store.task, eval_data, watchdog.beat, e.max_segments_per_seq, preemption.asked_alone
      ),
      schedule=Intervals(
        max_steps=e.MAX_STEPS,
        report_every=e.SUMMARY_INTERVAL_STEPS,
        evaluate_every=e.EVAL_INTERVAL_STEPS,
        save_times=SaveTimes(e.CHECKPOINT_EVERY_N_STEPS, 60 * e.CHECKPOINT_EVERY_N_MINUTES),
      ),
      compiler=self._compiler(store.task.mesh, watchdog.pause),
      folder=self.folder,
      throughput=self._throughput(store.task, data.batch_size),
      goodput=spent,
      watchdog=watchdog,
      rollbacks=Rollbacks(store.checkpoints, e.MAX_ROLLBACKS),
      trackers=e.trackers(self.folder),
      callbacks=self._callbacks(store, eval_data),
    )
    added = [c for make in extensions.added('callbacks') for c in make(self, trainer)]
    trainer.callbacks = sorted([*trainer.callbacks, *added], key=lambda c: c.rank)
    return trainer

  def _callbacks(self, store: StateStore, eval_data: Mapping[str, Input]) -> list[Callback]:
    """Returns what is called at the events of the loop; the class Callback states the order."""
    e = self.experiment
    best = self._best(store, eval_data)
    factor, window = e.LOSS_SPIKE_FACTOR, e.LOSS_SPIKE_WINDOW
    first, count, folder = e.PROFILER_CAPTURE_STEP, e.PROFILER_NUM_STEPS, self.folder / 'profile'
    return [
      *([SpikeDetector(factor, window)] if factor else []),
      *([best] if best else []),
      *e.callbacks(),
      StepProfiler(folder, first, count, e.MAX_STEPS),
    ]

  def _best(self, store: StateStore, eval_data: Mapping[str, Input]) -> Best | None:
    """Returns what keeps the best checkpoint; UserError if there is nothing to evaluate."""
    e = self.experiment
    if not e.KEEP_BEST and not e.EARLY_STOPPING_PATIENCE:
      return None
    if not eval_data:
      raise UserError(
        f'{type(e).__name__} has no evaluation input: without one, KEEP_BEST and '
        'EARLY_STOPPING_PATIENCE have nothing to compare'
      )
    name, patience = next(iter(eval_data)), e.EARLY_STOPPING_PATIENCE
    metric, task = e.BEST_METRIC, store.task.task
    run_checks.check_best_metric(metric, task.losses)
    return Best(
      self.folder, name, metric, e.KEEP_BEST, patience, self.own_disks, store=store,
      larger=task.larger_is_better(metric),
    )  # fmt: skip

  def _compiler(self, mesh: Mesh, beat: Callable[[], None]) -> StepCompiler:
    """Returns the compiler; UserError if the compiled step is for another mesh or machine."""
    e = self.experiment
    options = e.compiler_options(mesh.devices.flat[0].platform)
    memory = MemoryCheck(mesh, self.check_memory)
    if self.compiled_step is None:
      return StepCompiler(memory, options, beat=beat)
    saved = SavedStep(self.compiled_step, e.values(), options)
    saved.check(mesh)
    return StepCompiler(memory, options, saved, beat)

  def _throughput(self, task: ShardedTask, batch_size: int) -> Throughput:
    tokens = batch_size * self.experiment.MAX_SEQ_LEN
    of_token = self.experiment.trained_flops(task.task.optimizer, task.boxed_params)
    peak = peak_flops(task.mesh.devices.flat[0].device_kind)
    return Throughput(tokens, tokens * of_token / task.mesh.size, peak)

  def store(self) -> StateStore:
    """Returns the states of the run. They are checked early, because reading data takes time.

    Raises:
      UserError: The checkpoint that the run starts from does not fit the model.
    """
    e = self.experiment
    is_lora = isinstance(e, LanguageModel) and e.USE_LORA
    task = ShardedTask(fdl.build(e.build_task()), e.mesh(), e.rules, e.SEED)
    return StateStore(
      task=task,
      checkpoints=self.checkpoints(),
      batch_size=e.batch_size,
      restore=self.restore,
      reference=self.reference,
      trainable_only=is_lora and bool(e.CHECKPOINT_RESTORE_PATH),  # its base weights are there
      start_over=self.start_over,
      writes=self.save,
      stop_on_failure=e.STOP_ON_FAILED_SAVE,
    )

  def evaluator(self, beat: Callable[[], None]) -> tuple[StateStore, Evaluator]:
    """Returns the states of the run and an evaluator; training data is not read.

    Args:
      beat: Called after each batch.
    """
    e = self.experiment
    inputs = e.eval_inputs()
    if not inputs:
      names = [f': {n} names one' for n in ('EVAL_FILES', 'EVAL_SOURCES') if n in e.values()]
      raise UserError(f'{type(e).__name__} has no evaluation input{"".join(names)}')
    store = self.store()
    data = {name: fdl.build(cfg) for name, cfg in inputs.items()}
    run_checks.check_vocabulary(e, data)
    run_checks.check_eval_batches(e, data)
    run_checks.check_examples(e, data)
    return store, Evaluator(store.task, data, beat, e.max_segments_per_seq)

  def watchdog(self, goodput: Goodput) -> Watchdog:
    e = self.experiment
    limits = Limits(e.STEP_TIMEOUT, e.PHASE_TIMEOUT, e.STACK_TRACE_INTERVAL)
    return Watchdog(self.folder, limits, goodput, self.peers)

  def check_folder(self) -> None:
    """Raises UserError if the checkpoints are gone, or are those of another experiment."""
    self.check_present()
    if not self.checkpoints().steps():
      return
    if not self.accept_changes:
      refuse_other_experiment(self.experiment, self.folder)
      refuse_other_code(self.experiment, self.folder)
    run_checks.check_moments(self.experiment, self.folder)

  @property
  def code_changes(self) -> list[str]:
    """Texts on the code that has changed since the run's last start, as code_changes.changes."""
    return changes(self.experiment, self.folder) if self.checkpoints().steps() else []

  def check_present(self) -> None:
    """Raises UserError if the run has saved checkpoints and they are gone."""
    refuse_dangling(self.folder, f'--job_log_dir={self.folder}')
    if not self.start_over:
      self.checkpoints().refuse_missing()

  @property
  def holds_weights(self) -> bool:
    """Whether the folder holds imported weights, and no run."""
    return (self.folder / 'state').is_dir() and not self.checkpoints().steps()

  def check_evaluated(self) -> None:
    """Raises UserError if the folder's checkpoints are those of another experiment or model.

    Attributes that affect neither the model nor its backend may differ from those of training.
    """
    if not self.accept_changes and self.checkpoints().steps():
      self.check_model(also=self.experiment.plain_backend)
      if not is_of(self.experiment, self.folder):
        refuse_other_experiment(self.experiment, self.folder)

  def check_model(self, also: Iterable[str] = ()) -> None:
    """Raises UserError if the folder's checkpoints are those of another model.

    Args:
      also: Further attributes that must equal the run's, if the experiment has them.
    """
    refuse_other_model(self.experiment, self.folder, also)
    check_function(self.experiment, self.folder, self.folder / EXPERIMENT)

  @property
  def restore(self) -> Restore | None:
    """The checkpoint that a new run starts from. A model with another function is refused."""
    e = self.experiment
    if not e.CHECKPOINT_RESTORE_PATH:
      return None
    return Restore(
      path=e.CHECKPOINT_RESTORE_PATH,
      ignore=tuple(e.ignored_variables),
      rename=tuple(e.CHECKPOINT_RENAME_RULES),
      whole_state=e.CHECKPOINT_RESTORE_STATE,
      sizes=e.values_of(Kind.SHAPE),
      check=lambda source: check_function(e, source.folder, source.experiment),
    )

  @property
  def reference(self) -> Restore | None:
    """The checkpoint of a frozen reference model; None if there is none of its own."""
    e = self.experiment
    path = e.reference_path
    if not path or not isinstance(e, Objective):
      return None
    rename = e.CHECKPOINT_RENAME_RULES if path == e.CHECKPOINT_RESTORE_PATH else ()
    if e.reference() != e.initial_reference():  # what another model must equal is not known
      return Restore(path, rename=tuple(rename))
    return Restore(
      path,
      rename=tuple(rename),
      sizes=e.values_of(Kind.SHAPE),
      check=lambda source: check_function(e, source.folder, source.experiment),
    )

  def checkpoints(self) -> Checkpoints:
    keep, record = self.experiment.CHECKPOINT_MAX_TO_KEEP, SavedRecord(self.folder)
    return Checkpoints(self.folder / 'checkpoints', keep, self.read_only, self.own_disks, record)

  @property
  def decoding(self) -> LanguageModel:
    """The experiment; UserError if its model is not a language model."""
    if not isinstance(self.experiment, LanguageModel):
      raise UserError(f'{type(self.experiment).__name__} is not a language model')
    return self.experiment


@contextlib.contextmanager
def holding(run: Run, deletes: bool = True) -> Iterator[tuple[Run, FolderLock]]:
  """A context in which a run may use its folder; yields the run and the folder's lock.

  A run in an object store has its lease, and its folder is copied to the store.

  Args:
    run: The run.
    deletes: Whether checkpoints in a store that are more than CHECKPOINT_MAX_TO_KEEP are deleted.

  Raises:
    UserError: Another run has it, or the store cannot be used.
  """
  lock = FolderLock(run.folder)
  keep = run.experiment.CHECKPOINT_MAX_TO_KEEP if deletes else sys.maxsize
  try:
    if run.address is None:
      yield run, lock
    else:
      with scheme_of(run.address).holding(run.address, run.folder, keep, lock) as folders:
        yield dataclasses.replace(run, own_disks=folders > 1), lock
  finally:
    lock.release()  # the process of a notebook does not end here
