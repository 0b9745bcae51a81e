"""Evaluates zero-shot tasks with the parameters of a run, while it trains or afterwards."""

import pathlib
from collections.abc import Callable, Sequence

import fiddle as fdl
import jax

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import Tokenizer, open_tokenizer
from paxlite.eval.changes import changes, table_lines
from paxlite.eval.decoding import language_model, load
from paxlite.eval.eval_tasks import ZeroShotTask, read_tasks
from paxlite.eval.zero_shot import ZeroShot
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.rows import FromTfds
from paxlite.generation.inference import TextModel
from paxlite.processes import preemption
from paxlite.programs.first_start import noting
from paxlite.programs.run import Run
from paxlite.programs.run_folder import make_folder
from paxlite.tracking.summaries import Summaries
from paxlite.tracking.writers import EvalRecords, read_records
from paxlite.training.callbacks import Callback, Evaluations, Loop
from paxlite.training.evaluation import StoppedError
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer


def tasks_of(experiment: LanguageModel, names: Sequence[str]) -> list[ZeroShotTask]:
  """Returns the tasks of these names, read as the experiment says.

  Raises UserError if there is no such task, or one of its records cannot be read.
  """
  e = experiment
  dataset_folder = e.TFDS_DATA_DIR if isinstance(e, FromTfds) else ''
  return read_tasks(names, None, e.EVAL_SKIP_UNREADABLE, dataset_folder, e.EVAL_CHAT)


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns the callbacks that evaluate EVAL_TASKS during a run.

  A fine-tuning, that is, a run that starts from weights, is evaluated before its first step and at
  its end. EVAL_TASKS_IN_TRAINING evaluates any run at each evaluation. Raises UserError if there
  are no tasks, or the model cannot be asked.
  """
  e = noting(run, trainer.data.input).experiment
  if run.read_only or not isinstance(e, LanguageModel):
    return []
  always, is_tuning = e.EVAL_TASKS_IN_TRAINING, bool(e.CHECKPOINT_RESTORE_PATH)
  if always and not e.EVAL_TASKS:
    raise UserError('EVAL_TASKS_IN_TRAINING=True needs EVAL_TASKS: the tasks to evaluate')
  if always and not e.continues_text:
    raise UserError(
      'EVAL_TASKS_IN_TRAINING=True: a reward model, or layers of Transformer Engine, cannot be '
      'evaluated on tasks during training'
    )
  if not e.EVAL_TASKS or not (always or (is_tuning and e.continues_text)):
    return []
  tasks = tasks_of(e, e.EVAL_TASKS)
  tokenizer = open_tokenizer(e.tokenizer_path or e.weights.tokenizer)
  evaluation = TaskEvaluation(e, trainer.store.task, tokenizer, tasks, trainer.watchdog.pause)
  if not is_tuning:
    return [evaluation]
  return [BeforeAndAfter(evaluation, always, trainer.schedule.max_steps, run.folder)]


def evaluate_tasks(run: Run, names: Sequence[str]) -> None:
  """Evaluates the tasks of these names; prints tables and writes summaries."""
  e = language_model(run)
  tasks = tasks_of(e, names)
  inference, step = load(run)
  evaluate = ZeroShot(inference, e.EVAL_BATCH_TOKENS, e.EVAL_TOO_LONG)
  make_folder(run.folder)
  summaries = Summaries(run.folder, max_steps=step or 0)
  try:
    for task in tasks:
      result = evaluate(task)
      summaries.result(step or 0, task.name, result.values, result.line())
  finally:
    summaries.close()


class TaskEvaluation(Callback):
  """Evaluates tasks at each evaluation of a run.

  Args:
    experiment: The experiment of the run.
    task: Its task, on its mesh.
    tokenizer: The tokenizer of its data.
    beat: Called while a task is evaluated.
  """

  def __init__(
    self,
    experiment: LanguageModel,
    task: ShardedTask,
    tokenizer: Tokenizer,
    tasks: Sequence[ZeroShotTask],
    beat: Callable[[], None],
  ):
    plain = experiment.plain.replaced(**experiment.generating_values)
    model = fdl.build(plain.build_task()).model
    whole = TextModel(plain, model, None, task.mesh, tokenizer, experiment.num_positions)
    e = experiment
    self._evaluate = ZeroShot(whole, e.EVAL_BATCH_TOKENS, e.EVAL_TOO_LONG)
    self._evaluated = task.task.evaluated
    self._tasks, self._beat = tasks, beat

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> None:
    self.evaluate(state, step, summaries)

  @property
  def names(self) -> list[str]:
    return [task.name for task in self._tasks]

  def evaluate(self, state: TrainState, step: int, summaries: Summaries) -> None:
    """Evaluates the tasks, and reports their metrics as those of `step`."""
    self._evaluate.set_params(self._evaluated(state))
    try:
      for task in self._tasks:
        with preemption.evaluating(step):
          result = self._evaluate(task, self._report)
        summaries.result(step, task.name, result.values, result.line())
    finally:
      self._evaluate.set_params(None)  # the next step overwrites them

  def _report(self, done: int, total: int) -> None:
    self._beat()
    if preemption.asked_alone():
      raise StoppedError


class BeforeAndAfter(Callback):
  """Evaluates tasks before the first and after the last step, and reports the changes.

  Args:
    evaluation: Evaluates the tasks.
    always: Whether to evaluate at each evaluation between them too.
    max_steps: The last step of the run.
    folder: The folder of the run, whose records hold what was found before it was continued.
  """

  def __init__(
    self, evaluation: TaskEvaluation, always: bool, max_steps: int, folder: pathlib.Path
  ):
    self._evaluation, self._always = evaluation, always
    self._max_steps, self._folder = max_steps, folder
    self._evaluated: int | None = None

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    if step == 0:
      try:
        with loop.paused(state, 'evaluation'):
          self._evaluation.evaluate(state, step, loop.summaries)
      except StoppedError:
        preemption.check()  # raises Interrupted: the next start evaluates again

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> None:
    if self._always or step == self._max_steps:
      self._evaluation.evaluate(state, step, summaries)
      self._evaluated = step

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    if self._evaluated != step:  # a callback has ended the run
      with loop.paused(state, 'evaluation'):
        self._evaluation.evaluate(state, step, loop.summaries)
    if jax.process_index() == 0:
      found = changes(list(read_records(self._folder / EvalRecords.name)), self._evaluation.names)
      for line in table_lines(found):
        loop.summaries.say(line)
