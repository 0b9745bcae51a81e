"""The base class of experiments with a language model."""

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
