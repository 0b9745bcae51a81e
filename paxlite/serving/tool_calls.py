"""The calls of functions in the text of an answer, in the forms that models write them."""

import json
import re
import secrets
from typing import Any

from paxlite.core.json_text import JsonObject, parsed

_TAGGED = re.compile(r'<tool_call>\s*(.*?)\s*(?:</tool_call>|$)', re.DOTALL)
STARTS = ('<tool_call>', '{')  # an answer with calls begins with one of them, or contains the first


def parted(text: str) -> tuple[str, list[JsonObject]]:
  """Returns an answer without its calls, and the calls in OpenAI's form.

  Models of Qwen, Hermes and others write <tool_call>{"name": …, "arguments": {…}}</tool_call>.
  Llama writes {"name": …, "parameters": {…}} as the whole answer. What cannot be read stays text.
  """
  found = [_call(part) for part in _TAGGED.findall(text)]
  if found and None not in found:
    return _TAGGED.sub('', text).strip(), [call for call in found if call is not None]
  whole = _call(text)
  return (text, []) if whole is None else ('', [whole])


def _call(text: str) -> JsonObject | None:
  try:
    value: Any = parsed(text.strip())
  except ValueError:
    return None
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return None
  arguments = value.get('arguments', value.get('parameters'))
  if not isinstance(arguments, dict):
    return None
  return {
    'id': f'call_{secrets.token_hex(12)}',
    'type': 'function',
    'function': {
      'name': value['name'],
      'arguments': json.dumps(arguments, ensure_ascii=False),
    },
  }
