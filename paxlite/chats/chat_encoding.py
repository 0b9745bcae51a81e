"""The one place where pairs of prompt and answer, and conversations, become token ids.

Training, prompts, generation, evaluation and the export use it. Each text is encoded once, as a
whole. What is learned are spans of the text, and the tokens in these spans.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paxlite.chats.chat_format import ChatFormat, check_says_messages
from paxlite.chats.chat_spans import learned
from paxlite.chats.conversations import Conversation, Message, Tool, reasoning_of
from paxlite.chats.quoted_tokens import QuotedTokens
from paxlite.core.errors import UserError
from paxlite.data.document_encoding import DocumentEncoding
from paxlite.data.refused_records import RecordlessError
from paxlite.data.tokenizer import Tokenizer
from paxlite.data.tokens import Tokens

_ANSWER = 'Answer0Text'
_SHORT = 64  # characters of a text whose tokens are remembered, and how many such texts
_MARK = re.compile(r'<([|｜]).+\1>')  # the form of names that templates may put together


class Encoded(NamedTuple):
  """Token ids of an example."""

  ids: np.ndarray  # token ids, int32 [n]
  is_learned: np.ndarray  # whether each of them is learned, bool [n]
  # whether the text before the (last) answer alone, as a prompt, has other ids than together with
  # the answer: a token holds the end of one and the beginning of the other
  prompt_differs: bool = False
  # numbers, from 1, of answers that are not learned; see chat_spans.Learned
  missed: Sequence[int] = ()
  without_thinking: Sequence[bool] = ()  # see chat_spans.Learned
  is_unprompted: bool = False  # see chat_spans.Learned
  # whether the chat template leaves out the reasoning that the last answer of the conversation has
  is_without_its_thinking: bool = False


class ChatEncoding(DocumentEncoding):
  """Encodes texts, pairs and conversations for a model.

  Args:
    tokenizer, vocab_size, eos_ids: See DocumentEncoding.
    start_id: See DocumentEncoding. Conversations do not use it: a chat template writes its own.
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
    super().__init__(tokenizer, vocab_size, start_id, eos_ids)
    self._template, self._date, self._thinking = chat_template, date, thinking

  @property
  def options(self) -> tuple[int, int | None, Sequence[int], str, str, bool | None]:
    """The arguments besides the tokenizer, in their order."""
    own = self._template, self._date, self._thinking
    return self._vocab_size, self._start_id, self._eos_ids, *own

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
    """The encoder of conversations; raises UserError without a template."""
    tokens = self.tokenizer.named_tokens
    return ChatFormat(self._template, self.tokenizer.path, self._date, tokens)

  def check_template(self, place: str) -> None:
    """Raises RecordlessError if nothing writes conversations, such as the one at `place`."""
    try:
      _ = self.chat_format
    except UserError as e:
      hint = '' if self._template else '. CHAT_TEMPLATE=FILE gives one'
      raise RecordlessError(f'{place}: {e}{hint}') from None

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
      self._differs(inputs, tokens, is_learned, marked=False),
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
    self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, special: bool = True
  ) -> list[int]:
    """Returns the ids of a conversation, up to where the answer begins.

    Args:
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
    differs = self._differs(found.text[:last], tokens, is_last, marked=True)
    differs &= not found.is_unprompted  # which says more
    # templates such as Qwen3's drop that of earlier answers, in training as in use
    thinking = str(reasoning_of(chat.messages[-1]) or '').strip()
    return Encoded(
      tokens.ids, is_learned, differs, found.missed, found.without_thinking, found.is_unprompted,
      thinking not in found.text,
    )  # fmt: skip

  def _differs(self, prompt: str, tokens: Tokens, is_answer: np.ndarray, marked: bool) -> bool:
    """Returns whether a prompt alone has other ids than those before the answer in the text."""
    first = self._last_mark(prompt, tokens) if marked else 0
    alone = self._alone(prompt[tokens.starts[first] if first else 0 :], marked)
    ids, begins = tokens.ids[first:], np.flatnonzero(is_answer)[:1] - first
    return not np.array_equal(alone, ids[: len(alone)]) or bool((begins != len(alone)).any())

  def _alone(self, text: str, marked: bool) -> np.ndarray:
    encode = self._tokens_of_short if len(text) < _SHORT else self.tokenizer.encode_tokens
    return encode(text, marked).ids

  def _last_mark(self, prompt: str, tokens: Tokens) -> int:
    """Returns the number of the last token of a prompt that splits its text; 0: there is none.

    What precedes such a token has the same ids in all texts that begin so.
    """
    is_within = tokens.ends <= len(prompt)
    for i in reversed(np.flatnonzero(self._is_special[tokens.ids] & is_within).tolist()):
      if self._splits(prompt[tokens.starts[i] : tokens.ends[i]], int(tokens.ids[i])):
        return i
    return 0

  @functools.cached_property
  def _splits(self) -> Callable[[str, int], bool]:
    return functools.lru_cache(_SHORT)(self._is_border)

  def _is_border(self, mark: str, token: int) -> bool:
    """Returns whether the ids before a special token do not depend on it, nor those behind it."""
    if mark not in self._special_texts:
      return False
    ids = lambda *parts: [self._alone(part, True).tolist() for part in parts]
    before, behind, after, whole = ids('a', mark + 'a ', mark + mark + 'a ', f'a{mark}a ')
    return behind[:1] == [token] and after == [token, *behind] and whole == [*before, *behind]

  @functools.cached_property
  def _tokens_of_short(self) -> Callable[[str, bool], Tokens]:
    return functools.lru_cache(_SHORT)(self.tokenizer.encode_tokens)

  @functools.cached_property
  def _is_special(self) -> np.ndarray:
    found = np.zeros(self.tokenizer.vocab_size, bool)
    found[list(self.tokenizer.special_ids)] = True
    return found


TextEncoding = ChatEncoding  # its former name


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
