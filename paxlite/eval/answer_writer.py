"""Generates answers to prompts, for evaluation."""

from collections.abc import Callable, Sequence

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.generation.engine import Engine
from paxlite.generation.inference import TextModel
from paxlite.generation.request import Completion, Request


class AnswerWriter:
  """Answers prompts; keeps its engines, so that programs are compiled once."""

  def __init__(self, model: TextModel):
    self._model, self._params = model, model.params
    self._engines: dict[tuple[Sampling, bool], Engine] = {}

  def set_params(self, params: PyTree | None) -> None:
    """Sets the parameters of later answers; None frees them."""
    self._params = params
    for engine in self._engines.values():
      engine.params = params

  def __call__(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    until: Sequence[str] = (),
    sampling: Sampling | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    chat: bool = False,
  ) -> list[Completion]:
    """Returns the model's text after each prompt, up to one of `until`.

    Texts are those of the new tokens alone, as in EleutherAI's harness. Raises UserError if the new
    tokens leave no room for a prompt.

    Args:
      prompts: Token ids of the prompts. A prompt that leaves no room loses its beginning. One that
        occurs several times gets as many answers.
      max_new_tokens: Largest number of new tokens for each prompt.
      until: Strings that end the generated text.
      sampling: How tokens are sampled; None: as the experiment says.
      report: Called with the number of prompts done and the number of all prompts.
      chat: Whether the prompts are those of a chat; see TextModel.ends.
    """
    room = self._model.max_length - max_new_tokens
    if room < 1:
      raise UserError(
        f'an answer of {max_new_tokens:,} new tokens leaves no room for a prompt: the model takes '
        f'{self._model.max_length:,} tokens. Ask for fewer new ones'
      )
    engine, seed = self._engine(sampling, chat), self._model.experiment.SEED
    requests = [
      Request(
        prompt[-room:], max_new_tokens, engine.sampling, seed, i, ends=engine.ends, stop=until,
        continues=False,
      )
      for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    return engine.generate(requests, report)

  def _engine(self, sampling: Sampling | None, chat: bool) -> Engine:
    key = self._model.settings.sampling if sampling is None else sampling, chat
    if key not in self._engines:
      self._engines[key] = self._model.engine(*key)
      self._engines[key].params = self._params
    return self._engines[key]
