"""Parses function calls in an answer, in the forms that models write."""

import json
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import strictly_parsed
from paxlite.generation.spelling import Mark, shown

_OPEN, _CLOSE = '<tool_call>', '</tool_call>'

Span = tuple[int, int]


def parted(parts: Sequence[str], tools: Collection[str]) -> tuple[str, list[JsonObject]]:
  """Returns an answer without calls and special tokens, and the calls in OpenAI's format.

  Models of Qwen, Hermes and others write <tool_call>{"name": …, "arguments": {…}}</tool_call>.
  Llama writes {"name": …, "parameters": {…}} as the whole answer. What is no call of a tool of the
  request stays text.

  Args:
    parts: The parts of the answer; see generation/spelling.py.
  """
  text, calls, spans = ''.join(parts), [], _marks(parts)
  for start, end, inner in _tagged(text):
    call = _call(inner, tools)
    if call is not None:
      calls.append(call)
      spans.append((start, end))
  if calls:
    return _without(text, spans).strip(), calls
  said = shown(parts)
  whole = _call(said, tools)
  return (said, []) if whole is None else ('', [whole])


def _tagged(text: str) -> Iterator[tuple[int, int, str]]:
  """Yields where a tagged part begins and ends, and what is within its tags.

  It ends before the next one at the latest, so that each character is read a few times at most. The
  arguments of a call may contain the closing tag. The last part may lack it, where it is a token
  that ends the answer.
  """
  start = text.find(_OPEN)
  while start >= 0:
    inner = start + len(_OPEN)
    following = text.find(_OPEN, inner)
    limit = len(text) if following < 0 else following
    first, last = text.find(_CLOSE, inner, limit), text.rfind(_CLOSE, inner, limit)
    if first < 0:
      yield start, limit, text[inner:limit]
    for end in sorted({first, last} - {-1}):
      yield start, end + len(_CLOSE), text[inner:end]
    start = following


def _marks(parts: Sequence[str]) -> list[Span]:
  """Returns where special tokens are in the joined parts."""
  found, at = [], 0
  for part in parts:
    if isinstance(part, Mark):
      found.append((at, at + len(part)))
    at += len(part)
  return found


def _without(text: str, spans: Sequence[Span]) -> str:
  """Returns a text without some spans of it, which may overlap."""
  kept, at = [], 0
  for start, end in sorted(spans):
    kept.append(text[at:start])
    at = max(at, end)
  return ''.join([*kept, text[at:]])


def _call(text: str, tools: Collection[str]) -> JsonObject | None:
  """Parses a text as a call of one of these tools; None if it is not one."""
  try:
    value: Any = strictly_parsed(text.strip().encode())
  except ValueError:
    return None
  name = value.get('name') if isinstance(value, dict) else None
  if not isinstance(name, str) or name not in tools:
    return None
  arguments = value.get('arguments', value.get('parameters'))
  if not isinstance(arguments, dict):
    return None
  return {
    'id': f'call_{secrets.token_hex(12)}',
    'type': 'function',
    'function': {'name': name, 'arguments': json.dumps(arguments, ensure_ascii=False)},
  }
