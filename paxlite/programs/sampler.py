"""Continues texts with the parameters of a run that is being trained."""

from collections.abc import Sequence

import fiddle as fdl

from paxlite.core.trees import PyTree
from paxlite.data.tokenizer import Tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.generation.decoding import Generator, Sampling
from paxlite.training.callbacks import Callback, Evaluations
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.summaries import Summaries
from paxlite.training.train_state import TrainState

_TEMPERATURE = 0.8
_MOST_TOKENS = 100


class Sampler(Callback):
  """Continues prompts by up to 100 tokens.

  Args:
    experiment: The experiment of the run.
    task: Its task, on its mesh.
    tokenizer: The tokenizer of its data.
    prompts: The texts to continue at each evaluation.
  """

  def __init__(
    self,
    experiment: LanguageModel,
    task: ShardedTask,
    tokenizer: Tokenizer,
    prompts: Sequence[str] = (),
  ):
    self._experiment = experiment
    self._tokenizer = tokenizer
    self._encoding = experiment.encoding(tokenizer)
    self._prompts = prompts
    self._generator = Generator(
      fdl.build(experiment.plain.task()).model,
      None,
      experiment.num_positions,
      Sampling(temperature=_TEMPERATURE),
      eos_ids=experiment.eos_ids(tokenizer),
      is_token=tokenizer.is_token,
      mesh=task.mesh,
      rules=task.rules,
    )

  def __call__(self, params: PyTree, prompt: str) -> str:
    """Returns `prompt` and its continuation."""
    start = self._encoding.start_ids
    ids = self._encoding.prompt(prompt)[: self._experiment.num_positions - 1]
    self._generator.params = params
    try:
      return self._tokenizer.decode(
        ids[len(start) :] + self._generator.generate([ids], _MOST_TOKENS)[0]
      )
    finally:
      self._generator.params = None  # the next step overwrites them

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> None:
    texts = {prompt: self(state.params, prompt) for prompt in self._prompts}
    summaries.samples(step, texts)
