"""Continues prompts with the parameters of a run that is being trained."""

from collections.abc import Sequence

import fiddle as fdl

from paxlite.core.errors import UserError, located
from paxlite.data.tokenizer import Tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.generation.engine import Engine
from paxlite.generation.sampling import Sampling
from paxlite.generation.spelling import added_text
from paxlite.tracking.summaries import Summaries
from paxlite.training.callbacks import Callback, Evaluations
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState

TEMPERATURE = 0.8  # of samples
_MOST_TOKENS = 100


class Sampler(Callback):
  """Continues prompts by up to 100 tokens.

  Args:
    experiment: The experiment of the run.
    task: Its task, on its mesh.
    tokenizer: The tokenizer of its data.
    prompts: What to continue at each evaluation.
    chat: Whether the prompts are messages of the user, which the chat template writes, so that the
      model answers them.
  """

  def __init__(
    self,
    experiment: LanguageModel,
    task: ShardedTask,
    tokenizer: Tokenizer,
    prompts: Sequence[str] = (),
    chat: bool = False,
  ):
    self._experiment = experiment
    self.tokenizer = tokenizer
    self._encoding = experiment.encoding(tokenizer)
    self._prompts = prompts
    self._chat = chat
    self._evaluated = task.task.evaluated
    plain = experiment.plain.replaced(**experiment.generating_values)
    self._engine = Engine(
      fdl.build(plain.build_task()).model,
      None,
      experiment.num_positions,
      Sampling(temperature=TEMPERATURE),
      ends=experiment.eos_ids(tokenizer, chat),
      is_token=tokenizer.is_token,
      mesh=task.mesh,
      rules=task.rules,
    )

  @property
  def verb(self) -> str:
    """How a text is made of a prompt."""
    return 'answering' if self._chat else 'continuing'

  @property
  def description(self) -> list[str]:
    """A line for a run that samples."""
    if not self._chat:
      return []
    return [
      'Samples: prompts are messages of the user, written by the chat template '
      '(SAMPLE_CHAT=False continues them as plain text)'
    ]

  def check(self, prompts: Sequence[str]) -> None:
    """Raises UserError if a prompt is longer than the model takes, or there is no template."""
    most = self._experiment.num_positions - 1
    for prompt in prompts:
      with located(f'the prompt {prompt[:40]!r} of a sample'):
        count = len(self.ids(prompt))
        if not count:
          raise UserError('it is empty, and the model has no start token')
        if count > most:
          raise UserError(f'it has {count:,} tokens, and the model takes at most {most:,}')

  def ids(self, prompt: str) -> list[int]:
    """Returns the ids that the model reads of a prompt."""
    if self._chat:
      return self._encoding.chat_prompt([{'role': 'user', 'content': prompt}])
    return self._encoding.prompt(prompt)

  def __call__(self, state: TrainState, prompt: str) -> str:
    """Returns `prompt` and its continuation, or the answer in a chat."""
    return self.texts(state, [prompt])[0]

  def texts(self, state: TrainState, prompts: Sequence[str]) -> list[str]:
    """Returns what __call__ does for each prompt."""
    asked = [self.ids(prompt) for prompt in prompts]
    self._engine.params = self._evaluated(state)
    try:
      found = self._engine.continuations(asked, _MOST_TOKENS, samples=[0] * len(asked))
    finally:
      self._engine.params = None  # the next step overwrites them
    first, decode = len(self._encoding.start_ids), self.tokenizer.decode
    return [
      added_text(self.tokenizer, new, ids) if self._chat else decode(ids[first:] + new)
      for ids, new in zip(asked, found, strict=True)
    ]

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> None:
    texts = self.texts(state, self._prompts)
    summaries.samples(step, dict(zip(self._prompts, texts, strict=True)), self.verb)
