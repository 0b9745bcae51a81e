"""The base class of experiments with a language model."""

from paxlite.config.generation import GenerationSettings
from paxlite.data.text_encoding import TextEncoding
from paxlite.data.tokenizer import Tokenizer
from paxlite.experiments.parts.backend import Backends


class LanguageModel(Backends):
  """A decoder-only transformer on any backend, trained with Pax's Adam."""

  _is_published = False  # whether the experiments that fine-tune any model take it

  @property
  def learns_chats(self) -> bool:
    """Whether the model learns answers, so that what ends an answer of a chat always stops it."""
    return False

  @property
  def reads_clock(self) -> bool:
    """Whether the training data depend on the day, because the chat template writes it."""
    return False

  def encoding(self, tokenizer: Tokenizer) -> TextEncoding:
    """Returns what encodes texts and conversations for the model, as in its training."""
    return TextEncoding(
      tokenizer,
      self.VOCAB_SIZE,
      self.START_ID,
      self.EOS_IDS,
      self.CHAT_TEMPLATE,
      self.CHAT_DATE,
      self.CHAT_THINKING,
    )

  def eos_ids(self, tokenizer: Tokenizer, chat: bool = False) -> list[int]:
    """Returns the ids that end a text of the model, or an answer of a chat; any one ends it."""
    return self.generation(tokenizer).ends_of(chat)

  def generation(self, tokenizer: Tokenizer) -> GenerationSettings:
    """Returns how the model generates where a request does not say it."""
    encoding = self.encoding(tokenizer)
    chat_ends = tuple(encoding.chat_eos_ids)
    ends = chat_ends if self.learns_chats else tuple(encoding.eos_ids)
    return GenerationSettings(self.sampling(), ends, chat_ends, self.GENERATION_CONFIG)
