"""What is valid in examples for fine-tuning and nobody is likely to have meant."""

from collections.abc import Iterator, Sequence

from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import Pair
from paxlite.data.odd_records import texts_in

NO_ANSWER = 'no answer, which a run refuses'
BLANK_ANSWER = 'an answer that is empty'
OPEN = 'a last message that is not an answer, of which nothing is learned'


def odd_in(examples: Sequence[Pair | Conversation]) -> Iterator[tuple[str, str]]:
  """Yields the kinds of what is odd in the examples of a record, with details."""
  for contents in examples:
    if not isinstance(contents, Pair):
      yield from _odd_in_chat(contents)
    elif not contents.targets.strip():
      yield BLANK_ANSWER, ''


def _odd_in_chat(chat: Conversation) -> Iterator[tuple[str, str]]:
  learned = [chat.messages[i] for i in chat.learned]
  if not learned:
    yield NO_ANSWER, ''
    return
  if any(not any(t.strip() for t in texts_in(m.get('content'))) and not m.get('tool_calls')
         for m in learned):  # fmt: skip
    yield BLANK_ANSWER, ''
  if chat.messages[-1]['role'] != 'assistant':
    yield OPEN, f' ends with a message of the {chat.messages[-1]["role"]}'
