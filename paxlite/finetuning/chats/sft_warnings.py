"""Warnings about the examples of a fine-tuning run before it starts."""

import collections
from collections.abc import Iterable, Iterator, Sequence

from paxlite.chats.chat_encoding import Encoded
from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import Pair
from paxlite.core.json_text import texts_in
from paxlite.core.wording import amount

NO_ANSWER = 'no answer, which a run refuses'
BLANK_ANSWER = 'an answer that is empty'
BLANK_QUESTION = 'an empty user message'
OPEN = 'a last message that is not an answer, which is not learned'
_MOST_KEYS = 12  # that are named


class ExampleWarnings:
  """Counts oddities in examples.

  Attributes:
    counts: How many examples are odd, by kinds.
    first: The first place of each kind.
    unread: How many records have each key that nobody reads.
  """

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.first: dict[str, str] = {}
    self.unread: collections.Counter[str] = collections.Counter()

  def note(self, kind: str, place: str = '', count: int = 1) -> None:
    """Counts what was found at a place."""
    if count:
      self.counts[kind] += count
      self.first.setdefault(kind, place)

  def merge(self, later: 'ExampleWarnings') -> None:
    """Adds what is odd in later examples."""
    self.counts.update(later.counts)
    self.unread.update(later.unread)
    self.first = later.first | self.first

  def add(self, place: str, encoded: Encoded) -> None:
    """Counts what is odd in an example that was read at `place`."""
    self.note('differing', place, encoded.prompt_differs)
    self.note('unprompted', place, encoded.is_unprompted)
    self.note('unreasoned', place, encoded.is_without_its_thinking)
    for number in encoded.missed:
      self.note('missed', f'{place}, message {number}')
    without = sum(encoded.without_thinking)
    self.note('without_thinking', place, without)
    self.note('with_thinking', place, len(encoded.without_thinking) - without)

  def note_unread(self, keys: Iterable[str]) -> None:
    """Counts a record, and the keys of it that nobody has read."""
    self.note('records')
    self.unread.update(keys)

  @property
  def thinking(self) -> bool | None:
    """False if every answer follows a prompt without thinking; None otherwise."""
    return False if self.counts['without_thinking'] and not self.counts['with_thinking'] else None

  def lines(self, has_endless_answers: bool) -> list[str]:
    """Returns a line for each thing that is odd.

    Args:
      has_endless_answers: Whether there are prompts with one answer, and no id that ends it.
    """
    found, counts = [], self.counts
    if self.unread:
      keys = ', '.join(f'{key} ({count:,})' for key, count in self.unread.most_common(_MOST_KEYS))
      more = len(self.unread) - _MOST_KEYS
      found.append(
        f'Ignored keys, with how many of {counts["records"]:,} records have them: {keys}'
        + (f', and {more:,} more' if more > 0 else '')
      )
    if counts['labelled']:
      found.append(
        f'{self._counted("labelled", "record")} with a label: good and bad answers are learned '
        'alike; --method=kto reads the labels'
      )
    if has_endless_answers:
      found.append(
        'The tokenizer has no EOS, so answers have no end and the model does not learn to stop. '
        "Set 'EOS_IDS=[ID]', or use a tokenizer with an eos_token"
      )
    if counts['endless']:
      found.append(
        f'In {amount(counts["endless"], "chat")}, no answer ends with a stop token, so the model '
        'does not learn to stop: use a chat template that writes one in the learned text, or set '
        "'EOS_IDS=[ID]'"
      )
    if counts['differing']:
      found.append(
        f"{self._counted('differing', 'example')}: the prompt's tokens change when the answer "
        'follows, so generation starts from untrained text. If a space separates them, let the '
        'answer begin with it'
      )
    if counts['unprompted']:
      found.append(
        f'{self._counted("unprompted", "chat")}: the chat template writes another text before the '
        'last answer than in its prompt, so generation starts from untrained text. If it ends a '
        'prompt with <think> and drops the thinking of answers, CHAT_EXAMPLES=answers puts it '
        'there'
      )
    if counts['unreasoned']:
      found.append(
        f'{self._counted("unreasoned", "chat")}: the chat template leaves out the reasoning of '
        "the last answer, so it is not learned: write it into the answer's text, or set "
        'CHAT_TEMPLATE=FILE to one that writes it'
      )
    if counts['missed']:
      found.append(
        f'{self._counted("missed", "answer")} not learned, because their place in the chat '
        "template's text is unknown"
      )
    if self.thinking is False:
      found.append(
        "No answer begins with thinking, so this model's prompts do not ask for it "
        '(CHAT_THINKING=False)'
      )
    if counts['without_thinking'] and counts['with_thinking']:
      found.append(
        f'{counts["with_thinking"]:,} answers begin with thinking and '
        f'{counts["without_thinking"]:,} do not: prompts ask for thinking unless '
        'CHAT_THINKING=False'
      )
    return found

  def _counted(self, kind: str, noun: str) -> str:
    return f'{amount(self.counts[kind], noun)} (the first: {self.first[kind]})'


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
  is_blank = lambda m: not any(t.strip() for t in texts_in(m.get('content')))
  if any(is_blank(m) and not m.get('tool_calls') for m in learned):
    yield BLANK_ANSWER, ''
  if any(m['role'] == 'user' and is_blank(m) for m in chat.messages):
    yield BLANK_QUESTION, ''
  if chat.messages[-1]['role'] != 'assistant':
    yield OPEN, f' ends with a message of the {chat.messages[-1]["role"]}'
