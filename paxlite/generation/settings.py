"""How a model generates where a request does not say it: the one home of these settings.

Generation, chats, the server, evaluation and the exports read it. LanguageModel.generation makes it
of an experiment, and weights/generation_keys.py translates generation_config.json.
"""

import dataclasses
from collections.abc import Mapping

from paxlite.core.json_text import Json
from paxlite.generation.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
  """The settings of a model.

  Attributes:
    sampling: How tokens are chosen: TEMPERATURE, TOP_K, TOP_P and REPETITION_PENALTY.
    ends: Ids that end a text.
    chat_ends: Ids that end an answer of a chat.
    published: What generation_config.json of the publisher says, by its keys. Exports write it
      again. Of its sampling, the repetition penalty alone becomes a default here.
  """

  sampling: Sampling
  ends: tuple[int, ...]
  chat_ends: tuple[int, ...]
  published: Mapping[str, Json]

  def ends_of(self, chat: bool) -> list[int]:
    """Returns the ids that end a text, or an answer of a chat; any one of them ends it."""
    return [*(self.chat_ends if chat else self.ends)]

  @property
  def served(self) -> Sampling:
    """The sampling of requests in OpenAI's form, which draw at temperature 1 by default."""
    return dataclasses.replace(self.sampling, temperature=self.sampling.temperature or 1.0)
