"""Evaluates zero-shot tasks with the parameters of a run, while it trains or afterwards."""

from collections.abc import Callable, Sequence

import fiddle as fdl

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import Tokenizer, open_tokenizer
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
from paxlite.training.callbacks import Callback, Evaluations
from paxlite.training.evaluation import StoppedError
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer


def tasks_of(experiment: LanguageModel, names: Sequence[str]) -> list[ZeroShotTask]:
  """Returns the tasks of these names, read as the experiment says.

  Raises:
    UserError: There is no such task, or one of its records cannot be read.
  """
  e = experiment
  dataset_folder = e.TFDS_DATA_DIR if isinstance(e, FromTfds) else ''
  return read_tasks(names, None, e.EVAL_SKIP_UNREADABLE, dataset_folder, e.EVAL_CHAT)


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns what evaluates EVAL_TASKS while a run trains, if EVAL_TASKS_IN_TRAINING says so.

  Raises:
    UserError: There are no tasks, or the model cannot be asked.
  """
  e = noting(run, trainer.data.input).experiment
  if run.read_only or not isinstance(e, LanguageModel) or not e.EVAL_TASKS_IN_TRAINING:
    return []
  if not e.EVAL_TASKS:
    raise UserError('EVAL_TASKS_IN_TRAINING=True needs EVAL_TASKS: the tasks to evaluate')
  if not e.continues_text:
    raise UserError(
      'EVAL_TASKS_IN_TRAINING=True: a reward model, or layers of Transformer Engine, cannot be '
      'asked while they are trained'
    )
  tasks = tasks_of(e, e.EVAL_TASKS)
  tokenizer = open_tokenizer(e.tokenizer_path or e.weights.tokenizer)
  return [TaskEvaluation(e, trainer.store.task, tokenizer, tasks, trainer.watchdog.pause)]


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
    tasks: The zero-shot tasks.
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
