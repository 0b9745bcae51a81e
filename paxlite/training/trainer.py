"""The training loop, which evaluates, saves, draws a batch, trains on it and reports."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.stages import Compiled

from paxlite.cli import live_line, user_code
from paxlite.core.errors import Interrupted, TrainingError, UserError, WrongBitsError, line_of
from paxlite.core.json_text import JsonObject
from paxlite.data.device_batches import StepBatches
from paxlite.losses.metrics import Metrics
from paxlite.processes import join, preemption
from paxlite.tracking.summaries import Summaries
from paxlite.tracking.writers import Writer
from paxlite.training import moved_folder, not_finite
from paxlite.training.callbacks import Callback, Loop, LoopRequest
from paxlite.training.evaluation import Evaluator, StoppedError
from paxlite.training.goodput import Goodput
from paxlite.training.reporting import Reporter, Throughput
from paxlite.training.save_times import SaveTimes
from paxlite.training.skipped_steps import NotFiniteError, SkippedSteps, last_good
from paxlite.training.spikes import Rollbacks
from paxlite.training.state_store import StateStore
from paxlite.training.step_compiler import StepCompiler
from paxlite.training.train_data import TrainData
from paxlite.training.train_state import TrainState
from paxlite.training.watchdog import Watchdog

StepFunction = Callable[
  [Compiled, TrainState, dict[str, jax.Array], int], tuple[TrainState, Metrics]
]


@dataclasses.dataclass(frozen=True)
class Intervals:
  """The steps after which the loop reports, evaluates and saves."""

  max_steps: int  # training ends after this step
  report_every: int  # steps between two records of metrics
  evaluate_every: int  # steps between two evaluations
  # Decides after which steps to save. The last step is always saved.
  save_times: SaveTimes

  def reports(self, step: int) -> bool:
    return step % self.report_every == 0 or step == self.max_steps

  def evaluates(self, step: int) -> bool:
    return step % self.evaluate_every == 0 or step == self.max_steps

  def ahead(self, step: int, evaluates: bool = True) -> str:
    """Returns what comes next after a step, for the terminal: 'eval at 200, save at 500'."""
    after = lambda every: min((step // every + 1) * every, self.max_steps)
    evaluation = f'eval at {after(self.evaluate_every):,}, ' if evaluates else ''
    return f'{evaluation}save at {after(self.save_times.steps):,}'

  def saves(self, step: int) -> bool:
    """Returns whether to save after `step`. Every process calls this once after each step."""
    return step == self.max_steps or self.save_times.due(step)


@dataclasses.dataclass
class Trainer:
  """Trains a run from a state to its last step."""

  store: StateStore  # the states of the run
  data: TrainData  # the training data
  evaluator: Evaluator  # evaluates on the evaluation inputs
  schedule: Intervals  # the steps after which the loop reports, evaluates and saves
  compiler: StepCompiler  # compiles the train step
  folder: pathlib.Path  # the run's job_log_dir
  throughput: Throughput  # turns seconds per step into speeds
  goodput: Goodput  # records what wall time is spent on
  watchdog: Watchdog  # ends a run that hangs
  rollbacks: Rollbacks  # chooses the checkpoint to continue from after a loss spike
  # receive the metrics, besides the files, TensorBoard and the terminal
  trackers: Sequence[Writer] = ()
  callbacks: Sequence[Callback] = ()  # are called at the events of the loop, in this order
  # does a step with the compiled step, the state, the batch and the number of the step
  do_step: StepFunction = lambda compiled, state, batch, step: compiled(state, batch)

  def __post_init__(self) -> None:
    self._was_over = False  # at the step that the run continues from
    self._last_batches: dict[int, dict[str, jax.Array]] = {}  # of the last two steps

  def resume(self, step: int) -> None:
    """Moves the data to the batch of `step`; a second call for the same step changes nothing.

    Raises:
      UserError: The data cannot be read from there, or is not the data the run was trained on.
    """
    metadata = self.store.metadata(step)
    self.data.resume(step, metadata)
    self.rollbacks.count = int(metadata.get('rollbacks', 0))
    self._was_over = LoopRequest.of([c.resume(step) for c in self.callbacks]) is LoopRequest.END

  def is_complete(self, step: int) -> bool:
    """Returns whether a run that continues from `step` has nothing left to do."""
    is_over = self._was_over or step >= self.schedule.max_steps
    return is_over and not self._evaluation_is_due(step)

  def train(self, state: TrainState, step: int) -> TrainState:
    """Trains from `state` after step `step`, as `store.initial` returns them, to the last step.

    Raises:
      UserError: A tracker cannot start.
      TrainingError: Too many steps were skipped, the loss spiked too often, or a save failed.
      Interrupted: There was a signal. The trained state is saved.
    """
    followed = self.store.task.task.followed
    asked = [c for c in self.callbacks if type(c).on_evaluation is not Callback.on_evaluation]
    ahead = functools.partial(
      self.schedule.ahead, evaluates=bool(self.evaluator.inputs) or bool(asked)
    )
    summaries = Summaries(self.folder, self.schedule.max_steps, ahead, self.trackers, followed)
    self.goodput.reached(step)
    self.goodput.write()
    try:
      if self.is_complete(step):
        summaries.say(f'Training is complete: step {step:,} of {self.schedule.max_steps:,}.')
        if self.store.is_local(step):
          self.store.save(state, step, self.store.metadata(step))
      else:
        if step:
          kind = 'local state' if self.store.is_local(step) else 'checkpoint'
          summaries.say(f'Continuing from the {kind} of step {step:,}.')
        with join.leaving_together(before=summaries.close):
          state = self._train(state, step, summaries)
    finally:
      summaries.close()
      self.watchdog.pause()
      self.goodput.switch('save')
      self.store.close()
      summaries.write_kept()  # there may be space now, if the last save had to be tried again
      for callback in self.callbacks:
        callback.close()
      self.goodput.write()
    self.store.checkpoints.raise_failure()
    self._skipped_steps.check_all(int(state.skipped), self.schedule.max_steps)
    return state

  def _train(self, state: TrainState, start: int, summaries: Summaries) -> TrainState:
    summaries.start()
    self.resume(start)
    due = self._evaluation_is_due(start)
    summaries.drop_records_after(start, evaluated=start - 1 if due else start)
    self.evaluator.check()
    is_due, on_skipped = self.schedule.reports, self._skipped_steps.check
    self._reporter = Reporter(self.goodput, summaries, self.throughput, is_due, on_skipped)
    self._context = Loop(summaries, self._reporter.clock_stopped, self._metadata)
    for callback in self.callbacks:
      callback.on_start(state, start, self._context)
    self.store.checkpoints.note_saved()
    batches = self.data.batches(start, self.store.task.batch_sharding)
    try:
      compiled = self._compile(batches, summaries) if start < self.schedule.max_steps else None
      return self._loop(state, start, due, compiled, batches)
    finally:
      batches.close()

  def _compile(self, batches: StepBatches, summaries: Summaries) -> Compiled:
    """Returns the executable of the train step, for batches shaped like the first one."""
    with self.goodput.spent_on('data'):
      shapes = batches.shapes()
    self.goodput.switch('compile')
    before = time.perf_counter()
    with self.store.task.compiling(), live_line.working('Compiling the train step', summaries.say):
      lowered = self.store.task.lower_step(shapes)
      compiled, done = self.compiler(lowered, (self.store.task.abstract, shapes))
    self.watchdog.pause()
    summaries.say(f'{done} in {time.perf_counter() - before:.1f} s.')
    return compiled

  def _loop(
    self, state: TrainState, start: int, due: bool, compiled: Compiled | None, batches: StepBatches
  ) -> TrainState:
    """Trains until the last step; `due` says whether `start` is evaluated first.

    The checkpoint of step n is written before batch n is drawn. Its state has been trained on
    exactly the batches before n, and a run that resumes from it draws batch n next.
    """
    step, is_over = start, self._was_over and not due
    self.schedule.save_times.restart(start)
    while True:
      try:
        evaluates = self.schedule.evaluates(step) if step > start else due
        if preemption.reached(step, self.schedule.max_steps):
          self._leave(state, step, evaluates)
        if evaluates:
          is_over |= self._evaluate(state, step) is LoopRequest.END
        ends = is_over or step >= self.schedule.max_steps
        if step > start and (
          self.schedule.saves(step) or ends or moved_folder.is_moved(self.folder)
        ):
          self._checkpoint(state, step)
        if ends:
          return self._end(state, step)
        batch = self._draw(state, step, batches)
        assert compiled is not None
        step += 1
        self._last_batches = dict([*self._last_batches.items()][-1:]) | {step: batch}
        state, metrics = self.do_step(compiled, state, batch, step)
        request = self._stepped(state, step, metrics)
        is_over = request is LoopRequest.END
        if request is LoopRequest.ROLL_BACK:
          state, step = self._roll_back(state, step)
          start, due = step, False
      except StoppedError:
        self._leave(state, step, unevaluated=True)
      except WrongBitsError:
        raise  # the state may be wrong, and the step has overwritten it
      except NotFiniteError as e:
        self._save_last_good(state, step)
        raise TrainingError(f'{e}{self._not_finite(state, e.step)}') from None
      except TrainingError:
        self._save_last_good(state, step)
        raise

  def _draw(self, state: TrainState, step: int, batches: StepBatches) -> dict[str, jax.Array]:
    with self._saved_on_bad_data(state, step):
      for callback in self.callbacks:
        callback.before_step(state, step, self._context)
      with self._reporter.drawing():
        return batches.draw(state.params)

  def _stepped(self, state: TrainState, step: int, metrics: Metrics) -> LoopRequest | None:
    """Notes that a step is dispatched; returns what the callbacks request."""
    self.watchdog.beat()
    self.store.checkpoints.note_completed()
    self._reporter.step(step, metrics, state)
    with self._saved_on_bad_data(state, step, unevaluated=self.schedule.evaluates(step)):
      return LoopRequest.of(
        [c.after_step(state, step, metrics, self._context) for c in self.callbacks]
      )

  def _end(self, state: TrainState, step: int) -> TrainState:
    for callback in self.callbacks:
      callback.on_end(state, step, self._context)
    return state

  def _evaluation_is_due(self, step: int) -> bool:
    """Returns whether the run that saved `step` ended before it could evaluate this step."""
    return bool(self.store.metadata(step).get('unevaluated', False))

  def _evaluate(self, state: TrainState, step: int) -> LoopRequest | None:
    """Evaluates a state; returns what the callbacks request."""
    self.watchdog.pause()
    summaries = self._context.summaries
    with (
      self._saved_on_bad_data(state, step, unevaluated=True),
      self._reporter.clock_stopped(state, 'evaluation'),
    ):
      found = self.evaluator.report(state, step, summaries)
      return LoopRequest.of(
        [c.on_evaluation(state, step, found, summaries) for c in self.callbacks]
      )

  def _checkpoint(self, state: TrainState, step: int, unevaluated: bool = False) -> None:
    """Saves a state in the background, and tells it to the callbacks; see `_save`."""
    with self._reporter.clock_stopped(state, 'save'):
      self._save(state, step, unevaluated)
      for callback in self.callbacks if self.store.writes else ():
        callback.on_save(state, step, self._context)

  def _save(self, state: TrainState, step: int, unevaluated: bool = False) -> None:
    """Saves a state in the background.

    Raises TrainingError if too many steps in a row were skipped, a save failed, or the run's folder
    is not at its path any more.

    Args:
      state: The state after `step` steps.
      step: The step; its batch is the next one to be drawn.
      unevaluated: Whether a run that resumes from this checkpoint must first evaluate it.
    """
    self._skipped_steps.check(int(state.skipped_in_a_row), step)
    if not self.store.writes:
      return
    metadata = self._metadata(step)()
    if unevaluated:
      metadata['unevaluated'] = True
    self.store.save(state, step, metadata)

  def _metadata(self, step: int) -> Callable[[], JsonObject]:
    """Begins to collect the metadata of a step; returns a function that waits for them."""
    of_data, count = self.data.metadata(step), self.rollbacks.count
    return lambda: of_data() | ({'rollbacks': count} if count else {})

  @contextlib.contextmanager
  def _saved_on_bad_data(
    self, state: TrainState, step: int, unevaluated: bool = False
  ) -> Iterator[None]:
    """A context in which the state is saved before unreadable data, or a user's code, ends the run.

    A run of several processes saves nothing, because only one process knows of the error.
    """
    try:
      yield
    except Exception as e:
      is_own = isinstance(e, UserError) or user_code.frame_of(e) is not None
      if is_own and step and jax.process_count() == 1:
        self._save(state, step, unevaluated)
      raise

  def _save_last_good(self, state: TrainState, step: int) -> None:
    """Saves the state before the last skipped steps, if it is newer than all checkpoints."""
    in_a_row = int(state.skipped_in_a_row)
    newest = max(self.store.checkpoints.steps(), default=-1)
    if in_a_row and newest < step - in_a_row:
      self._save(last_good(state), step - in_a_row)

  def _not_finite(self, state: TrainState, step: int) -> str:
    """Returns what made a number of a skipped step that is not finite; '' if it is not found.

    Skipped steps leave the parameters as they are, so that the step can be done again.
    """
    if step not in self._last_batches or jax.process_count() > 1:
      return ''
    self.watchdog.pause()
    try:
      origin = not_finite.origin_of(self.store.task, state, self._last_batches[step], step)
    except Exception as e:  # operations one by one need more memory, and kernels a compiler
      return f'. The operation that caused it could not be found: {line_of(e)}'
    return f'. In step {step} it began with {origin}' if origin else ''

  def _leave(self, state: TrainState, step: int, unevaluated: bool) -> None:
    """Saves the trained state, and raises Interrupted."""
    if self._reporter.started:
      self._checkpoint(state, step, unevaluated)
      with self.goodput.spent_on('save'):
        self.store.checkpoints.finish()
    saved = self.store.checkpoints.steps()
    where = f'step {saved[-1]:,} is saved' if saved else 'nothing is saved'
    raise Interrupted(f'asked to leave at step {step:,}: {where}')

  def _roll_back(self, state: TrainState, spiked: int) -> tuple[TrainState, int]:
    """Returns the state of the last good checkpoint before a loss spike, and its step.

    The data is not rolled back: its next batch is the one after the spike. Raises TrainingError if
    there is no checkpoint, or the run has rolled back too often.
    """
    with self._reporter.clock_stopped(state, 'restore'):
      step = self.rollbacks.step_before(spiked, self.data.rows(spiked - 1))
      jax.tree.map(lambda x: x.delete(), state)  # there may be no memory for two states
      state, _ = self.store.restored(step)
      self.data.skip(spiked - step)
    for callback in self.callbacks:
      callback.on_start(state, step, self._context)
    self._reporter.roll_back(spiked, step)
    self.schedule.save_times.restart(step)
    return state, step

  @property
  def _skipped_steps(self) -> SkippedSteps:
    return SkippedSteps(self.store.task.task.max_skipped_steps, self.data.rows)
