"""The one place where documents, pairs of prompt and answer and conversations become token ids.

Training, prompts, generation, evaluation, the export and the tools use it, so that a text has one
tokenization. Each text is encoded once, as a whole, because the tokens on both sides of a cut can
depend on each other. What is learned are spans of the text, and the tokens in these spans.
"""

import functools
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.chat_format import ChatFormat, check_says_messages
from paxlite.data.chat_spans import learned
from paxlite.data.conversations import Conversation, Message, Tool, reasoning_of
from paxlite.data.quoted_tokens import QuotedTokens
from paxlite.data.refused_records import RecordlessError
from paxlite.data.tokenizer import Tokenizer, check_ids
from paxlite.data.tokens import Tokens

_ANSWER = 'Answer0Text'
_MARK = re.compile(r'<([|｜]).+\1>')  # the form of names that templates may put together


class Encoded(NamedTuple):
  """Token ids of an example.

  Attributes:
    ids: Token ids, int32 [n].
    is_learned: Whether each of them is learned, bool [n].
    prompt_differs: Whether the text before the (last) answer alone, as a prompt, has other ids
      than together with the answer: a token holds the end of one and the beginning of the other.
    missed: Numbers, from 1, of answers that are not learned; see chat_spans.Learned.
    without_thinking: See chat_spans.Learned.
    is_unprompted: See chat_spans.Learned.
    is_without_its_thinking: Whether the chat template leaves out the reasoning that the last answer
      of the conversation has.
  """

  ids: np.ndarray
  is_learned: np.ndarray
  prompt_differs: bool = False
  missed: Sequence[int] = ()
  without_thinking: Sequence[bool] = ()
  is_unprompted: bool = False
  is_without_its_thinking: bool = False


class TextEncoding:
  """Encodes texts and conversations for a model.

  Args:
    tokenizer: The tokenizer.
    vocab_size: Number of ids of the model; None: that of the tokenizer.
    start_id: The id that every text begins with; None: what the tokenizer puts there.
      Conversations do not use it, because a chat template writes its own.
    eos_ids: The ids that end a text; empty: the tokenizer's EOS, if it has one.
    chat_template: The Jinja template; '' takes the tokenizer's.
    date: The day that the template sees, as 2026-11-26; '': today.
    thinking: See ChatFormat.written; None: the template's default.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    start_id: int | None = None,
    eos_ids: Sequence[int] = (),
    chat_template: str = '',
    date: str = '',
    thinking: bool | None = None,
  ):
    self.tokenizer = tokenizer
    self._vocab_size = vocab_size or tokenizer.vocab_size
    self._start_id, self._eos_ids = start_id, tuple(eos_ids)
    self._template, self._date, self._thinking = chat_template, date, thinking
    self.num_tokens = self.num_unknown = 0

  @property
  def start_ids(self) -> list[int]:
    """The ids that a text begins with."""
    return self.tokenizer.start_ids if self._start_id is None else [self._start_id]

  @property
  def first_id(self) -> int:
    """The id that stands before the first token of a document.

    Raises:
      UserError: The tokenizer begins texts with none, and has neither BOS nor EOS.
    """
    found = self.start_ids[-1] if self.start_ids else self.stand_in
    if found is None:
      raise UserError(
        f'the tokenizer {self.tokenizer.path} has neither BOS nor EOS, and the first token of a '
        'document must follow another: START_ID=ID names it'
      )
    return found

  @property
  def stand_in(self) -> int | None:
    """The id that stands for an empty text: BOS, or else EOS; None: there is neither."""
    named = (self.tokenizer.special_id(name) for name in ('bos_token', 'eos_token'))
    return next((i for i in (*named, *self.end_ids) if i is not None), None)

  @property
  def eos_ids(self) -> list[int]:
    """The ids that end a text; any one of them ends it."""
    own = self.tokenizer.eos_id
    return list(self._eos_ids) or ([] if own is None else [own])

  @property
  def end_ids(self) -> list[int]:
    """The id that is written after a text that is learned; [] if nothing ends a text."""
    own = self.tokenizer.eos_id
    return [own] if own is not None and own in self.eos_ids else self.eos_ids[:1]

  @property
  def warnings(self) -> list[str]:
    """What a person should know before a model learns documents, a line each."""
    unknown = [self.unknown] if self.unknown else []
    if self.end_ids:
      return unknown
    return [
      *unknown,
      'Nothing ends a document: the tokenizer has no EOS, so that the model does not learn to '
      "stop. 'EOS_IDS=[ID]' names an id, or use a tokenizer with an eos_token",
    ]

  @property
  def unknown(self) -> str:
    """Says how much of what has been encoded the tokenizer does not know; '' if it knows all."""
    return unknown_tokens(self.num_unknown, self.num_tokens) if self.num_unknown else ''

  @functools.cached_property
  def fingerprint(self) -> int:
    """A checksum of the tokenizer and of what begins and ends a document."""
    starts: list[int | None] = [*self.start_ids] or [self.stand_in]
    return zlib.crc32(repr((self.tokenizer.fingerprint, starts, self.end_ids)).encode())

  @functools.cached_property
  def answer_end_ids(self) -> list[int]:
    """The ids of the tokens that the chat template writes after an answer or a tool call.

    [] if there is no template, or if it ends an answer with ordinary text.
    """
    try:
      chat_format = self.chat_format
    except UserError:
      return []
    found = [_end_of_answer(self.tokenizer, chat_format), _end_of_call(self.tokenizer, chat_format)]
    return list(dict.fromkeys(i for i in found if i is not None))

  @property
  def chat_eos_ids(self) -> list[int]:
    """The ids that end an answer of a chat; any one of them ends it."""
    return list(dict.fromkeys([*self.eos_ids, *self.answer_end_ids]))

  @functools.cached_property
  def chat_format(self) -> ChatFormat:
    """What writes conversations; raises UserError if there is no template."""
    tokens = self.tokenizer.named_tokens
    return ChatFormat(self._template, self.tokenizer.path, self._date, tokens)

  def check_template(self, place: str) -> None:
    """Raises RecordlessError if nothing writes conversations, such as the one at `place`."""
    try:
      _ = self.chat_format
    except UserError as e:
      hint = '' if self._template else '. CHAT_TEMPLATE=FILE gives one'
      raise RecordlessError(f'{place}: {e}{hint}') from None

  def text(self, text: str) -> list[int]:
    """Returns the ids of a text without those that begin and end it."""
    ids = self.tokenizer.encode(text)
    self._check(np.asarray(ids, np.int64))
    return ids

  def prompt(self, text: str) -> list[int]:
    """Returns the ids of a text that the model continues."""
    return self.start_ids + self.text(text)

  def document(self, text: str, ends: bool = True) -> np.ndarray:
    """Returns the ids [n] of a document, without the ids that it begins with.

    Args:
      text: Its text.
      ends: Whether the document ends with the text, so that what ends it is there.
    """
    ids = self.tokenizer.encode_array(text)
    self._check(ids)
    return np.concatenate([ids, np.array(self.end_ids if ends else [], ids.dtype)])

  def pair(self, inputs: str, targets: str) -> Encoded:
    """Returns the ids of a prompt and its answer; the answer and its end are learned."""
    tokens = self.tokenizer.encode_tokens(inputs + targets)
    self._check(tokens.ids)
    border = len(inputs)
    is_learned = tokens.within([(border, border + len(targets))])
    ended = len(tokens.ids) > 0 and is_learned[-1] and int(tokens.ids[-1]) in self.eos_ids
    end = [] if ended else self.end_ids
    before = self.start_ids
    return Encoded(
      np.concatenate([before, tokens.ids, end]).astype(np.int32),
      np.concatenate([np.zeros(len(before)), is_learned, np.ones(len(end))]).astype(bool),
      self._differs(inputs, tokens.ids, is_learned, marked=False),
    )

  def chat_text(
    self, messages: Sequence[Message], prompt: bool, tools: Sequence[Tool] | None = None
  ) -> str:
    """Returns the text of a conversation; with `prompt`, it ends where the answer begins."""
    text = self.chat_format.render(messages, prompt, tools, self._thinking)
    check_says_messages(text, messages)
    return text

  def marked(self, text: str) -> list[int]:
    """Returns the ids of a text that a chat template has written."""
    ids = self.tokenizer.encode_tokens(text, marked=True).ids
    self._check(ids)
    return ids.tolist()

  def chat_prompt(
    self,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    special: bool = True,
  ) -> list[int]:
    """Returns the ids of a conversation, up to where the answer begins.

    Args:
      messages: The messages.
      tools: The tools.
      special: Whether special tokens may stand in messages; otherwise they are ordinary text there.
    """
    self.chat_format.check_tools(Conversation(messages, tools))
    if special:
      return self.marked(self.chat_text(messages, True, tools))
    quoted = QuotedTokens(self._special_texts)
    foreign = [quoted.message(message) for message in messages]
    text, plain = quoted.restored(self.chat_text(foreign, True, quoted.tools(tools)))
    ids = self.tokenizer.encode_quoted(text, plain, self._special_texts)
    self._check(np.asarray(ids, np.int64))
    return ids

  @functools.cached_property
  def _special_texts(self) -> list[str]:
    """The texts of the tokens that a template writes around messages, special or not.

    Added tokens that are not special may also be words of ordinary text, as Gemma's for HTML.
    """
    special, templates = self.tokenizer.special_ids, '\n'.join(self.chat_format.texts.values())
    is_mark = lambda text: bool(text.strip()) and (text in templates or _MARK.fullmatch(text))
    return [text for i, text in self.tokenizer.added_texts.items() if i in special or is_mark(text)]

  def chat(self, chat: Conversation) -> Encoded:
    """Returns the ids of a conversation. What is learned are the answers with what ends them.

    Raises:
      UserError: There is no template, or it refuses the conversation, or leaves out a part of it.
    """
    self.chat_format.check_tools(chat)
    found = learned(self.chat_format, chat, self._thinking)
    check_says_messages(found.text, chat.messages)
    tokens = self.tokenizer.encode_tokens(found.text, marked=True)
    self._check(tokens.ids)
    is_learned = tokens.within(found.spans)
    last = found.spans[-1][0] if found.spans else 0
    is_last = is_learned & (tokens.ends > last)
    differs = self._differs(found.text[:last], tokens.ids, is_last, marked=True)
    differs &= not found.is_unprompted  # which says more
    # templates such as Qwen3's drop that of earlier answers, in training as in use
    thinking = str(reasoning_of(chat.messages[-1]) or '').strip()
    return Encoded(
      tokens.ids, is_learned, differs, found.missed, found.without_thinking, found.is_unprompted,
      thinking not in found.text,
    )  # fmt: skip

  def _differs(self, prompt: str, ids: np.ndarray, is_answer: np.ndarray, marked: bool) -> bool:
    """Returns whether a prompt alone has other ids than those before the answer in the text."""
    alone = self.tokenizer.encode_tokens(prompt, marked).ids
    begins = np.flatnonzero(is_answer)[:1]
    return not np.array_equal(alone, ids[: len(alone)]) or bool((begins != len(alone)).any())

  def _check(self, ids: np.ndarray) -> None:
    check_ids(self.tokenizer, ids, self._vocab_size)
    self.num_tokens += len(ids)
    if self.tokenizer.unk_id is not None:
      self.num_unknown += int((ids == self.tokenizer.unk_id).sum())


def unknown_tokens(count: int, total: int) -> str:
  """Says that this many tokens of all are unknown."""
  return (
    f'{count:,} of {total:,} tokens are unknown: the tokenizer lacks characters of the text, which '
    'the model cannot learn. Use a tokenizer with byte fallback, or one of this language'
  )


def _end_of_answer(tokenizer: Tokenizer, chat_format: ChatFormat) -> int | None:
  """Returns the added token right behind an answer, if there is one."""
  messages = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': _ANSWER}]
  found = _tokens_behind(tokenizer, chat_format, messages)
  if found is None:
    return None
  text, tokens = found
  for token, start, end in zip(*tokens, strict=True):
    is_blank = not text[start:end].strip()
    # Gemma has added tokens for blank lines, with which an answer may go on
    if int(token) in (tokenizer.special_ids if is_blank else tokenizer.added_texts):
      return int(token)
    if not is_blank:
      return None
  return None


def _end_of_call(tokenizer: Tokenizer, chat_format: ChatFormat) -> int | None:
  """Returns the last special token behind a tool call, if the template writes calls."""
  function = {'name': _ANSWER, 'arguments': {}}
  call = {'type': 'function', 'id': '123456789', 'function': function}
  messages: list[Message] = [
    {'role': 'user', 'content': 'x'},
    {'role': 'assistant', 'content': '', 'tool_calls': [call]},
  ]
  found = _tokens_behind(tokenizer, chat_format, messages)
  special = [] if found is None else [i for i in found[1].ids if int(i) in tokenizer.special_ids]
  return int(special[-1]) if special else None


def _tokens_behind(
  tokenizer: Tokenizer, chat_format: ChatFormat, messages: Sequence[Message]
) -> tuple[str, Tokens] | None:
  """Returns the text of messages and its tokens behind _ANSWER; None if that is not in the text."""
  try:
    text = chat_format.render(messages, False)
  except UserError:
    return None
  place = text.rfind(_ANSWER)
  if place < 0:
    return None
  return text, tokenizer.encode_tokens(text, marked=True).after(place + len(_ANSWER))
