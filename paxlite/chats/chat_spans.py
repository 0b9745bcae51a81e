"""Which part of a conversation's text is learned.

The text is that of the whole conversation, as transformers writes it. A template that has
{% generation %} blocks says itself what is learned. Otherwise, the prompt that asks for an answer
is the beginning of the text, and the answer is what follows it. Some templates write an answer in
another way once another turn follows, as Qwen3, which then drops the thinking. Such an answer is
looked for where the template puts a mark in place of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paxlite.chats.chat_format import ChatFormat
from paxlite.chats.conversations import Conversation, Message, thinking_of
from paxlite.core.errors import UserError

Span = tuple[int, int]

_MARK = 'Answer0Mark'


class Learned(NamedTuple):
  """The learned parts of a conversation."""

  text: str  # the text of the conversation
  spans: list[Span]  # first and last + 1 character of each part that is learned, in order
  # numbers, from 1, of the messages of the assistant that are not learned although they should be,
  # because nothing says where they are in the text
  missed: list[int]
  # whether each answer follows the prompt of a template whose thinking is turned off; only of
  # templates and answers for which that differs
  without_thinking: list[bool]
  # whether the last message is an answer, and no prompt that asks for it is the beginning of the
  # text: generation begins with what is not learned
  is_unprompted: bool = False


def learned(chat_format: ChatFormat, chat: Conversation, thinking: bool | None = None) -> Learned:
  """Returns the text of a conversation, and which parts of it are learned.

  Raises UserError if the template refuses the conversation, or nothing says where its answers are.

  Args:
    chat_format: Writes the text.
    chat: The conversation, whose `learned` answers are learned.
    thinking: See ChatFormat.written.
  """
  text, generated = chat_format.written(chat.messages, False, chat.tools, thinking)
  numbers = chat.learned
  finder = _MessageFinder(chat_format, chat, text, thinking)
  if chat_format.marks_learned(chat.tools):
    if chat.masked:
      generated = _unmasked(generated, chat)
    if chat.first_learned and numbers:
      start = finder.prompt(numbers[0])
      if start is None:
        raise _unknown()
      generated = [span for span in generated if span[0] >= start]
    return Learned(text, generated, [], [])
  spans: list[Span] = []
  missed = []
  for i in numbers:
    span = finder.answer(i)
    if span is None or span[0] >= span[1] or (spans and span[0] < spans[-1][1]):
      missed.append(i + 1)
    else:
      spans.append(span)
  if missed and not spans:
    raise _unknown()
  found = Learned(text, spans, missed, finder.without_thinking, finder.is_unprompted)
  return finder.as_asked(found) if chat.as_asked and found.is_unprompted else found


def _unmasked(generated: Sequence[Span], chat: Conversation) -> list[Span]:
  """Returns the blocks of {% generation %} of answers that are not masked; each has one."""
  answers = [i for i, message in enumerate(chat.messages) if message['role'] == 'assistant']
  if len(answers) != len(generated):
    raise UserError(
      f'the chat template has {len(generated)} blocks of {{% generation %}} for {len(answers)} '
      'answers, so the block of an answer that is not learned is unknown'
    )
  return [span for i, span in zip(answers, generated, strict=True) if i not in chat.masked]


def _unknown() -> UserError:
  return UserError(
    'the chat template does not write the conversation message by message, so the answer cannot '
    'be located'
  )


class _MessageFinder:
  """Finds the messages of a conversation in its text."""

  def __init__(self, chat_format: ChatFormat, chat: Conversation, text: str, thinking: bool | None):
    self._format, self._chat, self._text, self._thinking = chat_format, chat, text, thinking
    self.without_thinking: list[bool] = []
    self.is_unprompted = False

  def answer(self, number: int) -> Span | None:
    """Returns the place of a message with what ends it, and None if nothing says where it is."""
    start = self.prompt(number)
    last = number == len(self._chat.messages) - 1
    self.is_unprompted |= last and start is None
    alone = self._text if last else self._written(self._chat.messages[: number + 1])
    if start is not None and alone is not None and self._text.startswith(alone):
      return start, len(alone)
    found = self._marked(number)
    if found is None:
      return None
    return (found[0] if start is None else start), found[1]

  def as_asked(self, found: Learned) -> Learned:
    """Puts the thinking of the last answer behind a prompt that ends with <think>.

    The templates of DeepSeek-R1 end a prompt so, and write conversations without thinking.
    """
    *before, message = self._chat.messages
    prompt, thinking = self._written(before, prompt=True), thinking_of(message)
    if prompt is None or not prompt.rstrip().endswith('<think>') or not thinking:
      return found
    answer = found.text[found.spans[-1][0] : found.spans[-1][1]]
    text = f'{prompt}{thinking}\n</think>\n\n{answer}'
    return found._replace(text=text, spans=[(len(prompt), len(text))], is_unprompted=False)

  def prompt(self, number: int) -> int | None:
    """Returns the length of the longest prompt for a message with which the text begins."""
    variants: list[bool | None] = [self._thinking]
    if self._thinking is None and self._format.has_thinking:
      variants.append(False)
    found: list[tuple[int, bool]] = []
    prompts: set[str] = set()
    for variant in variants:
      prompt = self._written(self._chat.messages[:number], True, variant)
      if prompt is not None and prompt not in prompts:
        prompts.add(prompt)
        if self._text.startswith(prompt):
          found.append((len(prompt), variant is False and self._thinking is None))
    if not found:
      return None
    length, without = max(found)
    if len(prompts) > 1:
      self.without_thinking.append(without)
    return length

  def _marked(self, number: int) -> Span | None:
    """Looks for a message by the text in which a mark stands for it."""
    messages = list(self._chat.messages)
    messages[number] = {**messages[number], 'content': _MARK}
    whole, alone = self._written(messages), self._written(messages[: number + 1])
    if whole is None or alone is None or whole.count(_MARK) != 1 or alone.count(_MARK) != 1:
      return None
    before, after = whole.split(_MARK)
    end = len(self._text) - len(after)
    if end < len(before) or not self._text.startswith(before) or not self._text.endswith(after):
      return None
    closing = alone.split(_MARK)[1]
    # Some templates, as that of Phi-3, write EOS only behind the whole conversation.
    shorter = closing.removesuffix(self._format.eos_token)
    for found in (closing, closing.rstrip(), shorter, shorter.rstrip()):
      if after.startswith(found) and (found or not closing):
        return len(before), end + len(found)
    return None

  def _written(
    self, messages: Sequence[Message], prompt: bool = False, thinking: bool | None = None
  ) -> str | None:
    """Returns the text of messages; None if the template refuses them without the others."""
    thinking = self._thinking if thinking is None else thinking
    try:
      return self._format.render(messages, prompt, self._chat.tools, thinking)
    except UserError:
      return None
