"""The train step, and the loop around it."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from paxlite.core.errors import Interrupted, TrainingError, UserError
from paxlite.data.base import Input
from paxlite.data.device_batches import device_batches
from paxlite.parallel import partitioning
from paxlite.runtime import preemption, processes, profiling
from paxlite.runtime.compiled_step import SavedStep, compile_lowered
from paxlite.runtime.goodput import Goodput
from paxlite.runtime.watchdog import Watchdog
from paxlite.training.evaluation import Evaluator
from paxlite.training.memory_check import MemoryCheck
from paxlite.training.reporting import Reporter, Throughput
from paxlite.training.save_times import SaveTimes
from paxlite.training.saving import Saver
from paxlite.training.spikes import SpikeDetector
from paxlite.training.states import States
from paxlite.training.step import jitted_step
from paxlite.training.summaries import Summaries
from paxlite.training.task import Batch, Task
from paxlite.training.train_state import TrainState


@dataclasses.dataclass
class Trainer:
  """Trains a task on a mesh.

  Attributes:
    task: What to train.
    mesh: Where.
    rules: Logical axes to mesh axes.
    saver: Where its state comes from and is saved to, with where the data stands.
    data: Training input.
    eval_data: Evaluation inputs by name.
    folder: The run's job_log_dir.
    seed: Of dropout.
    seq_len: Tokens of a row.
    max_steps: Where to stop.
    summary_interval: Steps between reports.
    eval_interval: Steps between evaluations; one more follows the last step.
    save_times: When there is a checkpoint; one more follows the last step.
    flops_per_token: Model FLOPs, for TFLOP/s and MFU.
    goodput: Where wall time is noted.
    watchdog: What ends a run that hangs.
    spikes: What tells loss spikes, from which the run goes back to a checkpoint; None tells none.
    profiler_step: Step at which a trace starts, or None.
    profiler_steps: Steps of the trace.
    compiler_options: Of XLA, for the train step.
    saved_step: A compiled step to load; None compiles.
    memory: Compares a step with the memory that is left.
  """

  task: Task
  mesh: Mesh
  rules: partitioning.Rules
  saver: Saver
  data: Input
  eval_data: Mapping[str, Input]
  folder: pathlib.Path
  seed: int
  seq_len: int
  max_steps: int
  summary_interval: int
  eval_interval: int
  save_times: SaveTimes
  flops_per_token: float
  goodput: Goodput
  watchdog: Watchdog
  memory: MemoryCheck
  spikes: SpikeDetector | None = None
  profiler_step: int | None = None
  profiler_steps: int = 2
  compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  saved_step: SavedStep | None = None

  @property
  def states(self) -> States:
    return self.saver.states

  def train(self, state: TrainState, step: int) -> TrainState:
    """Runs from `state`, which `states.initial` gave with its step, to max_steps.

    Raises:
      TrainingError: too many gradients were not finite, or losses spiked too often.
      Interrupted: there was a signal; the step is saved.
    """
    summaries = Summaries(self.folder, self.max_steps)
    self.goodput.reached(step)
    self.goodput.write()
    try:
      if step >= self.max_steps and not self.saver.evaluation_is_due(step):
        summaries.say(f'Training is complete: step {step:,} of {self.max_steps:,}.')
      else:
        if step:
          summaries.say(f'Continuing from the checkpoint of step {step:,}.')
        with processes.leaving_together(before=summaries.close):
          state = self._loop(state, step, summaries)
    finally:
      summaries.close()
      self.watchdog.pause()
      self.goodput.switch('save')
      self.states.checkpoints.close()
      self.goodput.write()
    self.states.checkpoints.raise_failure()
    self.saver.check_skipped_in_all(int(state.skipped), self.max_steps)
    return state

  def _loop(self, state: TrainState, start: int, summaries: Summaries) -> TrainState:
    self.saver.resume(start)
    unevaluated = self.saver.evaluation_is_due(start)
    summaries.drop_records_after(start, evaluated=start - 1 if unevaluated else start)
    evaluate = Evaluator(self.task, self.mesh, self.rules, self.eval_data, self.watchdog.beat)
    evaluate.check()
    sharding = partitioning.batch_sharding(self.mesh, self.rules)
    batches = device_batches(self.data, sharding, start=self.saver.batch_of(start))
    profiler = profiling.StepProfiler(
      self.folder / 'profile', self.profiler_step, self.profiler_steps
    )
    report = Reporter(
      self.goodput, summaries, self._throughput, self._is_reported, self.saver.check_skipped
    )
    self.save_times.restart(start)
    compiled: Any = None
    step = start
    try:
      while True:
        # Evaluate, save, then draw the batch: what a checkpoint of step n holds has seen exactly
        # the batches before n, and a resumed run draws batch n next.
        last = step == self.max_steps
        evaluates = (step > start or unevaluated) and (last or step % self.eval_interval == 0)
        if preemption.reached(step, self.max_steps):
          self._leave(state, step, evaluates, report)
        if evaluates:
          unevaluated = True  # until it is done
          self.watchdog.pause()
          with report.clock_stopped(state, 'evaluation'):
            evaluate.report(state, step, summaries)
          unevaluated = False
        if step > start and (last or self.save_times.due(step)):
          with report.clock_stopped(state, 'save'):
            self.saver.save(state, step)
        if profiler.stops_at(step):
          with report.clock_stopped(state, 'profile'):
            profiler.stop()
        if last:
          break
        batch = report.next_batch(batches)
        if first := compiled is None:
          self.goodput.switch('compile')
          compiled = self._compile(state, batch, summaries)
          dispatched_at = time.perf_counter()
        if profiler.starts_at(step):
          with report.clock_stopped(state, 'profile'):
            profiler.start()
        state, metrics = compiled(state, batch)
        step += 1
        if first:
          report.start_clock(step, state, dispatched_at)
        self.watchdog.beat()
        report.step(step, metrics, state)
        if self.spikes is not None and self.spikes(report.last_loss):
          spiked = step
          with report.clock_stopped(state, 'restore'):
            jax.tree.map(lambda x: x.delete(), state)  # there may be no room for two
            step = start  # until then there is nothing to be saved
            state, start = self.saver.roll_back(spiked)
          summaries.drop_records_after(start, evaluated=start)
          summaries.say(f'The loss spiked at step {spiked:,}: back to the checkpoint of {start:,}.')
          report.roll_back(start)
          self.save_times.restart(start)
          step = start
    except UserError:  # the data turned out to be bad; of several processes one cannot save
      if step > start and jax.process_count() == 1:
        self.saver.save(state, step, unevaluated)
      raise
    except TrainingError:  # which all processes have
      if step > start:
        self.saver.save_last_good(state, step)
      raise
    finally:
      batches.close()
      profiler.stop()
    return state

  @property
  def _throughput(self) -> Throughput:
    tokens = self.data.batch_size * self.seq_len
    peak = profiling.peak_flops(self.mesh.devices.flat[0].device_kind)
    return Throughput(tokens, tokens * self.flops_per_token / self.mesh.size, peak)

  def _is_reported(self, step: int) -> bool:
    return step % self.summary_interval == 0 or step == self.max_steps

  def _leave(self, state: TrainState, step: int, unevaluated: bool, report: Reporter) -> None:
    """Saves what was trained, and raises Interrupted."""
    if report.started:
      with report.clock_stopped(state, 'save'):
        self.saver.save(state, step, unevaluated)
        self.states.checkpoints.finish()
    saved = self.states.checkpoints.steps()
    where = f'step {saved[-1]:,} is saved' if saved else 'nothing is saved'
    raise Interrupted(f'asked to leave at step {step:,}: {where}; the same command goes on')

  def _compile(self, state: TrainState, batch: Batch, summaries: Summaries) -> Any:
    before = time.perf_counter()
    with self.task.compiling(self.mesh, self.rules):
      step = jitted_step(self.task, self.mesh, self.rules, self.seed, self.states.abstract)
      lowered = step.lower(state, batch)
      if self.saved_step is None:
        compiled = compile_lowered(lowered, self.compiler_options)
        done = 'Compiled the train step'
      else:
        compiled = self.saved_step.load(lowered, (state, batch), self.mesh)
        done = f'Loaded the train step of {self.saved_step.path}'
    self.memory.step(compiled)
    self.watchdog.pause()
    summaries.say(f'{done} in {time.perf_counter() - before:.1f} s.')
    return compiled
