"""Evaluates zero-shot tasks with the parameters of a run that is being trained."""

from collections.abc import Callable, Sequence

import fiddle as fdl

from paxlite.data.tokenizer import Tokenizer
from paxlite.eval.eval_tasks import ZeroShotTask, read_tasks
from paxlite.eval.inference import TextModel
from paxlite.eval.zero_shot import ZeroShot
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.rows import FromTfds
from paxlite.processes import preemption
from paxlite.tracking.summaries import Summaries
from paxlite.training.callbacks import Callback, Evaluations
from paxlite.training.evaluation import StoppedError
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState


def tasks_of(experiment: LanguageModel, names: Sequence[str]) -> list[ZeroShotTask]:
  """Returns the tasks of these names, read as the experiment says.

  Raises:
    UserError: There is no such task, or one of its records cannot be read.
  """
  e = experiment
  dataset_folder = e.TFDS_DATA_DIR if isinstance(e, FromTfds) else ''
  return read_tasks(names, None, e.EVAL_SKIP_UNREADABLE, dataset_folder, e.EVAL_CHAT)


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
