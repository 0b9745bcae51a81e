"""The train step, and the loop around it."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paxlite import partitioning, profiling
from paxlite.compiled_step import SavedStep, compile_lowered
from paxlite.errors import TrainingError, UserError
from paxlite.evaluation import Evaluator, device_batches
from paxlite.inputs.base import Input, Seekable
from paxlite.metrics import Metrics, Weighted, to_host
from paxlite.optimizers import merge
from paxlite.states import States
from paxlite.summaries import Summaries
from paxlite.task import Batch, Task
from paxlite.train_state import TrainState


def train_step(
  task: Task, seed: int, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
  """One update; where gradient or loss is not finite, nothing changes but step and counters.

  Args:
    task: Loss, gradients and optimizer.
    seed: Of dropout; folded with the step.
    state: Overwritten where the jitted step donates it.
    batch: See Task.

  Returns:
    The next state, and scalars by their TensorBoard names.
  """
  rng = jax.random.fold_in(jax.random.key(seed), state.step)
  grads, overwritten, metrics = task.grads(state.params, batch, rng, state.overwritten)
  grad_norm = optax.tree.norm(grads)
  # past the limit nothing changes any more, so that the run can stop with its last good state
  finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics['total_loss'].value)
  valid = finite & (state.skipped_in_a_row < task.max_skipped_steps)
  grads = jax.tree.map(lambda g: jnp.where(valid, g, 0), grads)

  trainable, frozen = task.optimizer.split(state.params)
  updates, opt_state = task.optimizer.transformation.update(
    grads, state.opt_state, trainable, valid=valid
  )
  new_state = TrainState(
    step=state.step + 1,
    params=merge(optax.apply_updates(trainable, updates), frozen),
    opt_state=opt_state,
    overwritten=jax.tree.map(
      lambda new, old: jnp.where(valid, new, old), overwritten, state.overwritten
    ),
    skipped=state.skipped + ~valid,
    skipped_in_a_row=jnp.where(valid, 0, state.skipped_in_a_row + 1),
  )
  learning = {
    'lr': task.optimizer.learning_rate(state.opt_state),
    'raw_grad_norm': grad_norm,
    'clipped_grad_norm': task.optimizer.clipped(grad_norm),
    'is_valid_step': valid,
    'skipped_steps': new_state.skipped,
    'skipped_in_a_row': new_state.skipped_in_a_row,
  }
  one = jnp.ones(())
  named = {f'Metrics/{k}': m for k, m in metrics.items()}
  return new_state, named | {f'learning/{k}': Weighted(v, one) for k, v in learning.items()}


@dataclasses.dataclass
class Trainer:
  """Trains a task on a mesh.

  Attributes:
    task: What to train.
    mesh: Where.
    rules: Logical axes to mesh axes.
    states: Where its state comes from and is saved to.
    data: Training input.
    eval_data: Evaluation inputs by name.
    save: Whether checkpoints are written.
    folder: The run's job_log_dir.
    seed: Of dropout.
    seq_len: Tokens of a row.
    max_steps: Where to stop.
    summary_interval: Steps between reports.
    eval_interval: Steps between evaluations; one more follows the last step.
    save_interval: Steps between checkpoints; one more follows the last step.
    flops_per_token: Model FLOPs, for TFLOP/s and MFU.
    profiler_step: Step at which a trace starts, or None.
    profiler_steps: Steps of the trace.
    compiler_options: Of XLA, for the train step.
    saved_step: A compiled step to load; None compiles.
  """

  task: Task
  mesh: Mesh
  rules: partitioning.Rules
  states: States
  data: Input
  eval_data: Mapping[str, Input]
  save: bool
  folder: pathlib.Path
  seed: int
  seq_len: int
  max_steps: int
  summary_interval: int
  eval_interval: int
  save_interval: int
  flops_per_token: float
  profiler_step: int | None = None
  profiler_steps: int = 2
  compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  saved_step: SavedStep | None = None

  def train(self, state: TrainState, step: int) -> TrainState:
    """Runs from `state`, which `states.initial` gave with its step, to max_steps.

    Raises:
      TrainingError: too many gradients in a row were not finite.
    """
    summaries = Summaries(self.folder, self.max_steps)
    try:
      if step >= self.max_steps:
        summaries.say(f'Training is complete: step {step:,} of {self.max_steps:,}.')
      else:
        summaries.drop_records_after(step)
        if step:
          summaries.say(f'Continuing from the checkpoint of step {step:,}.')
        state = self._loop(state, step, summaries)
    finally:
      summaries.close()
      self.states.checkpoints.close()
    self.states.checkpoints.raise_failure()
    return state

  def _loop(self, state: TrainState, step: int, summaries: Summaries) -> TrainState:
    sharding = partitioning.batch_sharding(self.mesh, self.rules)
    self._seek(step)
    evaluate = Evaluator(self.task, self.mesh, self.rules, self.eval_data)
    evaluate.check()
    batches = device_batches(self.data, sharding, start=step)
    profiler = profiling.StepProfiler(
      self.folder / 'profile', self.profiler_step, self.profiler_steps
    )
    report = _Reporter(self, summaries)
    compiled = None
    start = step
    try:
      while True:
        # Evaluate, save, then draw the batch: what a checkpoint of step n holds has seen exactly
        # the batches before n, and a resumed run draws batch n next.
        last = step == self.max_steps
        if step > start and (last or step % self.eval_interval == 0):
          with report.clock_stopped(state):
            evaluate.report(state, step, summaries)
        if step > start and self.save and (last or step % self.save_interval == 0):
          with report.clock_stopped(state):
            self._save(state, step)
        if profiler.stops_at(step):
          with report.clock_stopped(state):
            profiler.stop()
        if last:
          break
        batch = next(batches)
        if compiled is None:
          compiled = self._compile(state, batch, summaries)
          first_step_at = time.perf_counter()
        if profiler.starts_at(step):
          with report.clock_stopped(state):
            profiler.start()
        state, metrics = compiled(state, batch)
        step += 1
        if step == start + 1:
          jax.block_until_ready(metrics)
          summaries.say(f'First step: {time.perf_counter() - first_step_at:.2f} s.')
          report.start_clock(step, state)
        report.step(step, metrics, state)
    except UserError:
      if step > start:
        self._save_before_leaving(state, step)
      raise
    finally:
      batches.close()
      profiler.stop()
    return state

  def _save_before_leaving(self, state: TrainState, step: int) -> None:
    """Saves what was trained when data turns out to be bad; of several processes one cannot."""
    if self.save and jax.process_count() == 1 and step not in self.states.checkpoints.steps():
      self._save(state, step)

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
    summaries.say(f'{done} in {time.perf_counter() - before:.1f} s.')
    return compiled

  def _save(self, state: TrainState, step: int) -> None:
    check_skipped(int(state.skipped_in_a_row), self.task.max_skipped_steps, step)
    positions = None
    if isinstance(self.data, Seekable):
      mine = self.data.position(step)
      halves = np.ascontiguousarray(mine, np.int64).view(np.int32)  # JAX would cut 64 bits off
      gathered = np.asarray(multihost_utils.process_allgather(halves)).reshape(-1, *halves.shape)
      positions = gathered.view(np.int64).tolist()
    self.states.save(step, state, positions)

  def _seek(self, step: int) -> None:
    """Puts an input that needs it where it stood at `step`."""
    if not isinstance(self.data, Seekable) or not step:
      return
    positions = self.states.positions(step)
    if positions is None or len(positions) != jax.process_count():
      stood = 'no position' if positions is None else f'positions of {len(positions)} processes'
      raise UserError(
        f'{self.data.name}: the checkpoint of step {step} holds {stood} of the data, and '
        f'{jax.process_count()} read it: continue with as many processes as before'
      )
    self.data.seek(step, np.array(positions[jax.process_index()], np.int64))


def jitted_step(
  task: Task, mesh: Mesh, rules: partitioning.Rules, seed: int, abstract: TrainState
) -> Any:
  """train_step as a jitted function of (state, batch) that overwrites the state.

  Args:
    task: See train_step.
    mesh: Where it runs.
    rules: Logical axes to mesh axes.
    seed: See train_step.
    abstract: The state's shapes, dtypes and shardings.
  """

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    with partitioning.activate(mesh, rules):
      return train_step(task, seed, state, batch)

  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def check_skipped(in_a_row: int, limit: int, step: int) -> None:
  """Raises TrainingError when the `in_a_row` steps before `step` were skipped and reach `limit`."""
  if in_a_row >= limit:
    first = step - in_a_row
    raise TrainingError(
      f'{in_a_row} steps in a row had a gradient that is not finite, from step {first} on '
      f'(MAX_SKIPPED_STEPS={limit}). The last good state was kept; lower LEARNING_RATE, or look at '
      f'the data of step {first}'
    )


class _Reporter:
  """Reads metrics from the device one step late, and keeps the clock of productive time."""

  def __init__(self, trainer: Trainer, summaries: Summaries):
    self._trainer = trainer
    self._summaries = summaries
    self._pending: tuple[int, Metrics, jax.Array] | None = None
    self._var_norm = jax.jit(optax.tree.norm)
    self._last_step = 0
    self._last_time = 0.0
    self._peak = profiling.peak_flops(trainer.mesh.devices.flat[0].device_kind)

  def step(self, step: int, metrics: Metrics, state: TrainState) -> None:
    """Step `step` is dispatched: reports the one before if that is due."""
    self.flush()
    if step % self._trainer.summary_interval == 0 or step == self._trainer.max_steps:
      self._pending = (step, metrics, self._var_norm(state.params))

  def flush(self) -> None:
    """Reports what is pending; waits for the device to get there."""
    if self._pending is None:
      return
    step, metrics, var_norm = self._pending
    self._pending = None
    scalars = to_host(metrics) | {'learning/var_norm': float(var_norm)}
    self._summaries.train(step, scalars, self._speed(step))
    in_a_row = int(scalars['learning/skipped_in_a_row'])
    check_skipped(in_a_row, self._trainer.task.max_skipped_steps, step)

  def start_clock(self, step: int, state: TrainState) -> None:
    """Time and steps before now count for nothing: compilation and the first step are over."""
    self._var_norm(state.params).block_until_ready()  # compiled here
    self._last_step, self._last_time = step, time.perf_counter()

  @contextlib.contextmanager
  def clock_stopped(self, state: TrainState) -> Iterator[None]:
    """A context whose time does not count as training; what came before is done and reported."""
    self.flush()
    jax.block_until_ready(state)  # queued steps are training, not evaluation
    before = time.perf_counter()
    yield
    self._last_time += time.perf_counter() - before

  def _speed(self, step: int) -> dict[str, float | None]:
    now = time.perf_counter()
    steps = step - self._last_step
    if not steps:  # the first step alone
      return dict.fromkeys(('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu'))
    seconds = (now - self._last_time) / steps
    self._last_step, self._last_time = step, now
    tokens = self._trainer.data.batch_size * self._trainer.seq_len / seconds
    flops = tokens * self._trainer.flops_per_token / self._trainer.mesh.size
    return {
      'tokens_per_second': tokens,
      'step_seconds': seconds,
      'model_tflops': flops / 1e12,  # per device
      'mfu': None if self._peak is None else flops / self._peak,
    }
