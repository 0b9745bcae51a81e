"""The environment of a model: replies to its answers, and rewards of episodes.

A reward is a function of (record, answer) that returns a number. An environment is a class with two
methods, for episodes of several turns. Both are named by dotted paths, and run in processes of
their own (user_processes.py). They know the record of a prompt and what was said, and
nothing else: so an episode can be repeated. What an environment does wrong ends its episode alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Record = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]  # with a role and a content each


class Environment(Protocol):
  """Answers a model, and says what its episode is worth."""

  def reply(self, record: Record, messages: Messages) -> str | Mapping[str, Any] | Messages | None:
    """Returns what follows the model's last message.

    Args:
      record: The record of the prompt.
      messages: The conversation so far, which ends with a message of the assistant.

    Returns:
      A text of the user, a message with a role, as of a tool, or several of them; None: the
      episode has ended.
    """
    ...

  def reward(self, record: Record, messages: Messages) -> float | Sequence[float]:
    """Returns the reward of a whole episode, a finite number, or one for each answer of the model.

    The reward of an episode is their sum.
    """
    ...
