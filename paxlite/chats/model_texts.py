"""How the texts and chats of a model become ids, and how it generates."""

import dataclasses
from collections.abc import Mapping

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.config.generation import Sampling
from paxlite.core.json_text import Json
from paxlite.data.tokenizer import Tokenizer
from paxlite.experiments.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
  """How a model generates where a request does not say it."""

  sampling: Sampling  # how tokens are chosen: TEMPERATURE, TOP_K, TOP_P and REPETITION_PENALTY
  ends: tuple[int, ...]  # ids that end a text
  chat_ends: tuple[int, ...]  # ids that end an answer of a chat
  # What generation_config.json of the publisher says, by its keys. Exports write it again. Of its
  # sampling, the repetition penalty alone becomes a default here.
  published: Mapping[str, Json]

  def ends_of(self, chat: bool) -> list[int]:
    """Returns the ids that end a text, or an answer of a chat; any one of them ends it."""
    return [*(self.chat_ends if chat else self.ends)]

  @property
  def served(self) -> Sampling:
    """The sampling of requests in OpenAI's form, which draw at temperature 1 by default."""
    return dataclasses.replace(self.sampling, temperature=self.sampling.temperature or 1.0)


def encoding_of(e: LanguageModel, tokenizer: Tokenizer) -> ChatEncoding:
  """Returns what encodes texts and conversations for a model, as in its training."""
  return ChatEncoding(
    tokenizer, e.VOCAB_SIZE, e.START_ID, e.EOS_IDS, e.CHAT_TEMPLATE, e.CHAT_DATE, e.CHAT_THINKING
  )


def generation_of(e: LanguageModel, tokenizer: Tokenizer) -> GenerationSettings:
  """Returns how a model generates where a request does not say it."""
  encoding = encoding_of(e, tokenizer)
  chat_ends = tuple(encoding.chat_eos_ids)
  ends = chat_ends if e.learns_chats else tuple(encoding.eos_ids)
  return GenerationSettings(e.sampling(), ends, chat_ends, e.GENERATION_CONFIG)
