"""A run: an experiment, its folder, and the trainer that is built from them."""

import dataclasses
import pathlib

import fiddle as fdl

from paxlite import extensions
from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.data.base import Input
from paxlite.experiments.base import Experiment
from paxlite.processes import preemption
from paxlite.processes.peers import Peers
from paxlite.programs import run_checks, trainer_parts
from paxlite.programs.weights_model import knowing_weights, reference_of, restore_of
from paxlite.training.evaluation import Evaluator
from paxlite.training.goodput import Goodput
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.spikes import Rollbacks
from paxlite.training.state_store import StateStore
from paxlite.training.trainer import Trainer
from paxlite.training.watchdog import Limits, Watchdog


@dataclasses.dataclass(frozen=True)
class Run:
  """An experiment and the folder that it runs in."""

  experiment: Experiment  # the experiment, validated
  # the folder job_log_dir, or the one on this machine where that is in an object store
  folder: pathlib.Path
  # whether training writes checkpoints; it continues from existing ones in both cases
  save: bool = True
  # whether the folder of another experiment, or of other data, may be continued
  accept_changes: bool = False
  # whether training may start from the beginning if all checkpoints are damaged
  start_over: bool = False
  read_only: bool = False  # whether the folder must stay unchanged
  # a file of `paxlite compile` to load instead of compiling
  compiled_step: pathlib.Path | None = None
  # whether to refuse a program that needs more memory than the devices have
  check_memory: bool = True
  peers: Peers = dataclasses.field(default_factory=Peers)  # the other processes of the run
  data: Input | None = None  # the training data, if they have been read already
  address: str | None = None  # the job_log_dir, if it is an address
  own_disks: bool = False  # whether each process has its own folder on this machine for it
  command: str = ''  # the command that started it, which its folder keeps; '': there is none

  def __post_init__(self) -> None:
    object.__setattr__(self, 'experiment', knowing_weights(self.experiment))

  @property
  def place(self) -> str | pathlib.Path:
    """The job_log_dir, for messages."""
    return self.address or self.folder

  def checkpoints(self) -> Checkpoints:
    keep, record = self.experiment.CHECKPOINT_MAX_TO_KEEP, SavedRecord(self.folder)
    return Checkpoints(self.folder / 'checkpoints', keep, self.read_only, self.own_disks, record)

  def store(self) -> StateStore:
    """Returns the states of the run. They are checked early, because reading data takes time.

    Raises UserError if the checkpoint that the run starts from does not fit the model.
    """
    e = self.experiment
    return StateStore(
      task=ShardedTask(fdl.build(e.build_task()), e.mesh(), e.rules, e.SEED),
      checkpoints=self.checkpoints(), batch_size=e.batch_size, restore=restore_of(e),
      reference=reference_of(e), trainable_only=e.saves_trainable_only, start_over=self.start_over,
      writes=self.save, stop_on_failure=e.STOP_ON_FAILED_SAVE,
    )  # fmt: skip

  def watchdog(self, goodput: Goodput) -> Watchdog:
    e = self.experiment
    limits = Limits(e.STEP_TIMEOUT, e.PHASE_TIMEOUT, e.STACK_TRACE_INTERVAL)
    return Watchdog(self.folder, limits, goodput, self.peers)

  def trainer(self, watchdog: Watchdog | None = None) -> Trainer:
    """Builds the trainer; raises UserError before a file is written or a program is compiled.

    Args:
      watchdog: Ends a run that hangs, and has the record of how its time is spent.
    """
    e, watchdog = self.experiment, watchdog or self.watchdog(Goodput(None))
    inputs = e.train_input(), e.eval_inputs()  # only configs, to report a missing dataset first
    store = self.store()
    data = fdl.build(inputs[0]) if self.data is None else self.data
    eval_data = {name: fdl.build(cfg) for name, cfg in inputs[1].items()}
    run_checks.check_inputs(e, eval_data, data)
    store.batch_size = data.batch_size
    store.task.task.optimizer.check(store.task.abstract.params)
    run_checks.check_reference_tokenizer(e)
    segments, beat, mesh = e.max_segments_per_seq, watchdog.beat, store.task.mesh
    trainer = Trainer(
      store=store,
      data=trainer_parts.train_data(e, data, eval_data, self.folder, self.accept_changes),
      evaluator=Evaluator(store.task, eval_data, beat, segments, preemption.asked_alone),
      schedule=trainer_parts.schedule(e),
      compiler=trainer_parts.compiler(
        e, mesh, watchdog.pause, self.check_memory, self.compiled_step
      ),
      folder=self.folder,
      throughput=trainer_parts.throughput(e, store.task, data.batch_size),
      goodput=watchdog.goodput,
      watchdog=watchdog,
      rollbacks=Rollbacks(store.checkpoints, e.MAX_ROLLBACKS),
      trackers=e.trackers(self.folder),
    )
    trainer.callbacks = trainer_parts.callbacks(e, trainer, self.own_disks)
    added = [c for make in extensions.added('callbacks') for c in make(self, trainer)]
    trainer.callbacks = sorted([*trainer.callbacks, *added], key=lambda c: c.rank)
    return trainer
