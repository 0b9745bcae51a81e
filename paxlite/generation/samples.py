"""Samples from a run's parameters during training."""

import dataclasses
from collections.abc import Sequence

import fiddle as fdl
import jax

from paxlite.chats.model_texts import encoding_of, generation_of
from paxlite.cli.terminal import say
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError, located
from paxlite.data.base import Input, RowInput
from paxlite.data.example_rows import ExampleRows
from paxlite.data.mixture import MixtureInput
from paxlite.data.tokenizer import Tokenizer, open_tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.generation.engine import Engine
from paxlite.generation.spelling import added_text
from paxlite.programs.first_start import noting
from paxlite.programs.run import Run
from paxlite.tracking.summaries import Summaries
from paxlite.training.callbacks import Callback, Evaluations
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState
from paxlite.training.trainer import Trainer

_TEMPERATURE = 0.8
_MOST_TOKENS = 100


def callbacks(run: Run, trainer: Trainer) -> list[Callback]:
  """Returns the callbacks that continue a run's prompts during and after training."""
  e = noting(run, trainer.data.input).experiment
  if run.read_only or not isinstance(e, LanguageModel):
    return []
  last = [] if e.SAMPLE_PROMPT is None else [e.SAMPLE_PROMPT]
  if not last and not e.SAMPLE_PROMPTS:
    return []
  sampler = sampler_of(e, trainer.store.task, trainer.data.input)
  is_alone = jax.process_count() == 1
  found: list[Callback] = [LastSample(sampler, last if is_alone else [])]
  if sampler is not None and e.SAMPLE_PROMPTS and is_alone:
    found.append(PromptSamples(sampler, e.SAMPLE_PROMPTS))
  return found


def sampler_of(e: LanguageModel, task: ShardedTask, data: Input) -> 'Sampler | None':
  """Returns the sampler of an experiment; None if its model cannot generate.

  Raises UserError if there is no tokenizer, no chat template, or a prompt is too long.

  Args:
    task: Its task, on its mesh.
    data: The training data.
  """
  tokenizer = open_tokenizer(e.tokenizer_path or e.weights.tokenizer)
  if not e.continues_text:
    return None
  chat = _has_chats(data) if e.SAMPLE_CHAT is None else e.SAMPLE_CHAT
  sampler = Sampler(e, task, tokenizer, chat)
  sampler.check(e.SAMPLE_PROMPTS + ([] if e.SAMPLE_PROMPT is None else [e.SAMPLE_PROMPT]))
  return sampler


class Sampler:
  """Continues prompts by up to 100 tokens.

  Args:
    experiment: The experiment of the run.
    task: Its task, on its mesh.
    tokenizer: The tokenizer of its data.
    chat: Whether the prompts are messages of the user, which the chat template writes, so that the
      model answers them.
  """

  def __init__(
    self, experiment: LanguageModel, task: ShardedTask, tokenizer: Tokenizer, chat: bool = False
  ):
    self._experiment = experiment
    self.tokenizer = tokenizer
    self._encoding = encoding_of(experiment, tokenizer)
    self._chat = chat
    self._evaluated = task.task.evaluated
    plain = experiment.plain.replaced(**experiment.generating_values)
    self._engine = Engine(
      fdl.build(plain.build_task()).model, None, experiment.num_positions,
      Sampling(temperature=_TEMPERATURE), ends=generation_of(experiment, tokenizer).ends_of(chat),
      is_token=tokenizer.is_token, mesh=task.mesh, rules=task.rules,
    )  # fmt: skip

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
      'PromptSamples: prompts are messages of the user, written by the chat template '
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
          raise UserError(f'it has {count:,} tokens; the limit is {most:,}')

  def ids(self, prompt: str) -> list[int]:
    """Returns the ids that the model reads of a prompt."""
    if self._chat:
      return self._encoding.chat_prompt([{'role': 'user', 'content': prompt}])
    return self._encoding.prompt(prompt)

  def texts(self, state: TrainState, prompts: Sequence[str]) -> list[str]:
    """Returns each prompt and its continuation, or the answers in a chat."""
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


@dataclasses.dataclass
class PromptSamples(Callback):
  """Continues prompts at each evaluation."""

  sampler: Sampler  # continues them
  prompts: Sequence[str]

  rank = 1  # after other evaluations

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> None:
    texts = self.sampler.texts(state, self.prompts)
    summaries.samples(step, dict(zip(self.prompts, texts, strict=True)), self.sampler.verb)


@dataclasses.dataclass
class LastSample(Callback):
  """Continues prompts with the trained model, after the run."""

  sampler: Sampler | None  # continues them; None: the model cannot
  prompts: Sequence[str]

  def start_lines(self) -> Sequence[str]:
    return [] if self.sampler is None else self.sampler.description

  def after_training(self, state: TrainState) -> None:
    for prompt in self.prompts:
      if self.sampler is None:
        say("No samples: Transformer Engine's layers do not support generation")
        continue
      (text,) = self.sampler.texts(state, [prompt])
      how = f'at temperature {_TEMPERATURE}, {self.sampler.verb} {prompt!r}'
      say(f'\nA sample {how}:\n{text}\n')


def _has_chats(data: Input) -> bool:
  """Returns whether a source of the data has conversations."""
  inputs = data.inputs if isinstance(data, MixtureInput) else [data]
  sources = [each.source for each in inputs if isinstance(each, RowInput)]
  return any(isinstance(source, ExampleRows) and source.has_chats for source in sources)
