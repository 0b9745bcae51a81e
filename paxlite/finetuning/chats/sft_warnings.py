"""What a person should know of the examples of a fine-tuning run before it begins."""

import collections
from collections.abc import Iterable, Iterator, Sequence

from paxlite.chats.chat_encoding import Encoded
from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import Pair
from paxlite.core.json_text import texts_in
from paxlite.core.wording import amount

NO_ANSWER = 'no answer, which a run refuses'
BLANK_ANSWER = 'an answer that is empty'
OPEN = 'a last message that is not an answer, of which nothing is learned'
_MOST_KEYS = 12  # that are named


class ExampleWarnings:
  """Counts what is odd in examples.

  Attributes:
    endless: Number of conversations without a learned token that stops generation.
    labelled: Places of records with a label, which is not read.
  """

  def __init__(self) -> None:
    self.endless = 0
    self.labelled: list[str] = []
    self._differing: list[str] = []
    self._missed: list[str] = []
    self._unprompted: list[str] = []
    self._unreasoned: list[str] = []
    self._without_thinking = self._with_thinking = 0
    self._records = 0
    self._unread: collections.Counter[str] = collections.Counter()

  def add(self, place: str, encoded: Encoded) -> None:
    """Counts what is odd in an example that was read at `place`."""
    if encoded.prompt_differs:
      self._differing.append(place)
    if encoded.is_unprompted:
      self._unprompted.append(place)
    if encoded.is_without_its_thinking:
      self._unreasoned.append(place)
    self._missed += [f'{place}, message {number}' for number in encoded.missed]
    self._without_thinking += sum(encoded.without_thinking)
    self._with_thinking += len(encoded.without_thinking) - sum(encoded.without_thinking)

  def note_unread(self, keys: Iterable[str]) -> None:
    """Counts a record, and the keys of it that nobody has read."""
    self._records += 1
    self._unread.update(keys)

  @property
  def thinking(self) -> bool | None:
    """False if every answer follows a prompt without thinking; None otherwise."""
    return False if self._without_thinking and not self._with_thinking else None

  def lines(self, has_endless_answers: bool) -> list[str]:
    """Returns a line for each thing that is odd.

    Args:
      has_endless_answers: Whether there are prompts with one answer, and no id that ends it.
    """
    found = []
    if self._unread:
      keys = ', '.join(f'{key} ({count:,})' for key, count in self._unread.most_common(_MOST_KEYS))
      more = len(self._unread) - _MOST_KEYS
      found.append(
        f'Keys that are not read, with how many of {self._records:,} records have them: {keys}'
        + (f', and {more:,} more' if more > 0 else '')
      )
    if self.labelled:
      found.append(
        f'{_counted(self.labelled, "record")} with a label: all answers are learned, good and bad '
        'ones; --method=kto reads the labels'
      )
    if has_endless_answers:
      found.append(
        'Nothing ends an answer: the tokenizer has no EOS, so that the model does not learn to '
        "stop. 'EOS_IDS=[ID]' names an id, or use a tokenizer with an eos_token"
      )
    if self.endless:
      found.append(
        f'{self.endless:,} chats end no answer with a token that stops generation, so that the '
        'model does not learn to stop: the chat template must write such a token within what is '
        "learned, or 'EOS_IDS=[ID]' names it"
      )
    if self._differing:
      found.append(
        f'{_counted(self._differing, "example")}: the prompt alone has other tokens than together '
        'with the answer, so that generation begins with what was not learned. Where a space is '
        'between them, let the answer begin with it'
      )
    if self._unprompted:
      found.append(
        f'{_counted(self._unprompted, "chat")}: the chat template writes another text before the '
        'last answer than in the prompt that asks for it, so that generation begins with what was '
        'not learned. If it ends a prompt with <think> and drops the thinking of answers, '
        'CHAT_EXAMPLES=answers puts it there'
      )
    if self._unreasoned:
      found.append(
        f'{_counted(self._unreasoned, "chat")}: the chat template leaves out the reasoning of the '
        'last answer, so that it is not learned: write it into the text of the answer, or '
        'CHAT_TEMPLATE=FILE gives one that writes it'
      )
    if self._missed:
      found.append(
        f'{_counted(self._missed, "answer")} not learned, because nothing says where the chat '
        'template writes them'
      )
    if self.thinking is False:
      found.append(
        'No answer begins with thinking, so that prompts of this model ask for none '
        '(CHAT_THINKING=False)'
      )
    if self._without_thinking and self._with_thinking:
      found.append(
        f'{self._with_thinking:,} answers begin with thinking and {self._without_thinking:,} do '
        'not: prompts ask for thinking, and CHAT_THINKING=False asks for none'
      )
    return found


def _counted(places: list[str], noun: str) -> str:
  return f'{amount(len(places), noun)} (the first: {places[0]})'


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
