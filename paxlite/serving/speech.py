"""The parts of a chat answer: thinking, content, and function calls."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from paxlite.core.json_text import JsonObject
from paxlite.generation import tool_calls
from paxlite.generation.spelling import Mark, shown

THINKING = {'<think>': '</think>', '[THINK]': '[/THINK]'}  # what begins it, and what ends it


class Said(NamedTuple):
  """A part of an answer."""

  reasoning: str  # its thinking
  content: str  # what is shown to the user
  calls: list[JsonObject]  # its calls in OpenAI's form, with the last part of an answer


class Thinking:
  """Splits an answer into thinking and content while it is generated.

  An answer thinks if it begins with one of THINKING, or the prompt has ended with it. The blanks
  around thinking belong to neither half.

  Args:
    close: What ends the thinking that the prompt has begun; '': it has begun none.

  Attributes:
    reasoning: Texts of the thinking, which the caller takes out.
    content: Parts of the content, which the caller takes out.
  """

  def __init__(self, close: str):
    self._close = close
    self._is_over = False
    self._held = ''  # text of which it is not known yet what it is
    self._drops_blanks = bool(close)
    self.reasoning: list[str] = []
    self.content: list[str] = []

  def add(self, part: str) -> None:
    """Reads the next part of the answer, a text or a Mark."""
    if self._is_over:
      self._say(part)
    elif self._close:
      self._think(part)
    else:
      self._begin(part)

  def close(self) -> None:
    """Ends the answer."""
    if self._close and not self._is_over:
      self._reason(self._held.rstrip())
    else:
      self._say(self._held)
    self._held = ''

  def _begin(self, part: str) -> None:
    """Reads a part at the beginning of the answer."""
    whole = self._held + part
    begun = whole.lstrip()
    opening = next((tag for tag in THINKING if begun.startswith(tag)), None)
    if opening is not None:
      self._close, self._held, self._drops_blanks = THINKING[opening], '', True
      if rest := begun[len(opening) :]:
        self._think(rest)
    elif not isinstance(part, Mark) and any(tag.startswith(begun) for tag in THINKING):
      self._held = whole
    else:
      self._is_over = True
      self._say(self._held)
      self._say(part)
      self._held = ''

  def _think(self, part: str) -> None:
    """Reads a part within the thinking."""
    if isinstance(part, Mark) and part != self._close:
      return
    start = max(0, len(self._held) - len(self._close) + 1)
    self._held += part
    at = self._held.find(self._close, start)
    if at < 0:
      settled = self._held[: len(self._held) - _begun(self._held, self._close)].rstrip()
      self._reason(settled)
      self._held = self._held[len(settled) :]
      return
    self._reason(self._held[:at].rstrip())
    rest, self._held = self._held[at + len(self._close) :], ''
    self._is_over = self._drops_blanks = True
    self._say(rest)

  def _reason(self, text: str) -> None:
    text = text.lstrip() if self._drops_blanks else text
    if text:
      self._drops_blanks = False
      self.reasoning.append(text)

  def _say(self, part: str) -> None:
    if self._drops_blanks and not isinstance(part, Mark):
      part = part.lstrip()
    if part:
      self._drops_blanks = self._drops_blanks and isinstance(part, Mark)
      self.content.append(part)


class Speech:
  """Interprets an answer while it is generated.

  Args:
    close: See Thinking; None: the answer has a form that the request states, and is content alone.
    tools: The names of the tools that the answer may call.
  """

  def __init__(self, close: str | None, tools: Collection[str]):
    self._thinking = None if close is None else Thinking(close)
    self._tools = tools

  def add(self, parts: Sequence[str], is_last: bool) -> Said:
    """Returns what further parts of the answer are.

    Where there are tools, the content comes with the last part: only then it is known what of it
    are calls.
    """
    thinking = self._thinking
    if thinking is None:
      return Said('', shown(parts), [])
    for part in parts:
      thinking.add(part)
    if is_last:
      thinking.close()
    reasoning, thinking.reasoning = ''.join(thinking.reasoning), []
    if self._tools and not is_last:
      return Said(reasoning, '', [])
    content, thinking.content = thinking.content, []
    if not self._tools:
      return Said(reasoning, shown(content), [])
    return Said(reasoning, *tool_calls.parted(content, self._tools))


def opened(text: str) -> str:
  """Returns what ends the thinking that the text of a prompt has begun; '' if it has begun none."""
  return next((close for tag, close in THINKING.items() if text.rstrip().endswith(tag)), '')


def _begun(text: str, tag: str) -> int:
  """Returns how many characters at the end of a text may be the beginning of a tag."""
  lengths = range(min(len(tag) - 1, len(text)), 0, -1)
  return next((n for n in lengths if text.endswith(tag[:n])), 0)
