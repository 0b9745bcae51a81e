"""Reading JSON: files that hold an object, and JSON lines."""

import json
import os
import pathlib
import re
from collections.abc import Iterator

import orjson

from paxlite.core.errors import UnreadableError, UserError
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.files.text_files import check_file, lines

_DEPTH = 100  # levels of nested lists and objects
_SPACE = re.compile(r'[ \t\r\n]*')


def read_json_lines(path: str) -> Iterator[tuple[str, JsonObject]]:
  """The lines of a .jsonl file as objects, each with its position 'path:line'.

  Raises:
    UserError: A line is not UTF-8 or no JSON object; the message names the file and the line.
  """
  for number, line in lines(path):
    place = f'{path}:{number + 1}'
    yield place, parse_line(line, place)


def read_object(path: pathlib.Path) -> JsonObject:
  """Reads a JSON file that holds an object.

  Raises:
    UnreadableError: The file cannot be read.
    UserError: The file is missing or damaged, or holds something else.
  """
  if os.path.exists(path):
    check_file(path)
  try:
    found = parsed(path.read_text(encoding='utf-8'))
    _check_depth(found)
  except FileNotFoundError:
    raise UserError(f'{path} is missing') from None
  except OSError as e:
    raise UnreadableError(f'{path} cannot be read: {e.strerror or e}') from None
  except ValueError as e:
    raise UserError(f'{path} is damaged ({e})') from None
  if not isinstance(found, dict):
    raise UserError(f'{path} is damaged: it does not hold a JSON object')
  return found


def parse_line(line: bytes, place: str) -> JsonObject:
  """Returns the JSON object on a line; raises UserError where the line holds none."""
  try:
    record = orjson.loads(line)
  except orjson.JSONDecodeError:
    record = _parse_slowly(line, place)
  if not isinstance(record, dict):
    raise UserError(f'{place} is not a JSON object')
  if line.count(b'[') + line.count(b'{') > _DEPTH:  # deep nesting needs as many
    try:
      _check_depth(record)
    except ValueError as e:
      raise UserError(f'{place}: {e}') from None
  return record


def parse_text(text: str) -> Json:
  """Returns the value of a JSON text in a record; raises ValueError where it is none."""
  found = orjson.loads(text)
  _check_depth(found)
  return found


def is_json(line: bytes) -> bool:
  """Whether a line holds a whole value of JSON."""
  try:
    orjson.loads(line)
  except orjson.JSONDecodeError:
    return False
  return True


def parse_objects(text: str, path: str) -> Iterator[tuple[int, JsonObject]]:
  """Yields the objects of a JSON list, or objects that follow each other, over any lines.

  Yields the number from 0 of the line in which each object begins, and the object. Raises UserError
  if the text is neither; the message names `path` and the line.
  """
  after = lambda i: _SPACE.match(text, i).end()  # type: ignore[union-attr]
  at, line, counted = after(0), 0, 0
  in_list = text.startswith('[', at)
  at = after(at + in_list)
  if in_list and text.startswith(']', at):
    return
  while at < len(text) or in_list:
    line, counted = line + text.count('\n', counted, at), at
    value, at = _parse_at(text, at, path, line)
    yield line, value
    at = after(at)
    if in_list:
      mark = text[at : at + 1]
      if mark not in (',', ']') or (mark == ']' and after(at + 1) < len(text)):
        line += text.count('\n', counted, at)
        raise UserError(
          f'{path}:{line + 1} is not JSON: after an object, "," or the end of the list'
        )
      if mark == ']':
        return
      at = after(at + 1)


def _parse_at(text: str, start: int, path: str, line: int) -> tuple[JsonObject, int]:
  """Returns the object that begins at `start`, and where it ends."""
  place = f'{path}:{line + 1}'
  try:
    value, end = json.JSONDecoder().raw_decode(text, start)
    _check_depth(value)
    if '\\u' in text[start:end]:
      json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    raise UserError(f'{place} has half of a surrogate pair, which is not valid text') from None
  except json.JSONDecodeError as e:
    raise UserError(f'{path}:{e.lineno} is not JSON: {e.msg}') from None
  except (ValueError, RecursionError) as e:
    raise UserError(f'{place} is not JSON: {e}') from None
  if not isinstance(value, dict):
    raise UserError(f'{place} is not a JSON object')
  return value, end


def _check_depth(value: Json) -> None:
  """Raises ValueError for JSON nested so deeply that code which walks it would run out of stack."""
  level = [value] if isinstance(value, list | dict) else []
  for _ in range(_DEPTH):
    level = [
      x
      for inner in level
      for x in (inner.values() if isinstance(inner, dict) else inner)
      if isinstance(x, list | dict)
    ]
    if not level:
      return
  raise ValueError(f'lists and objects in it are more than {_DEPTH} deep')


def _parse_slowly(line: bytes, place: str) -> Json:
  """Parses a line by the json package, which accepts NaN and reports the position of an error."""
  try:
    record = parsed(line.decode('utf-8'))
    json.dumps(record, ensure_ascii=False).encode()
    return record
  except UnicodeEncodeError:
    raise UserError(f'{place} has half of a surrogate pair, which is not valid text') from None
  except UnicodeDecodeError as e:
    raise UserError(f'{place} is not UTF-8 (byte {e.start} of the line)') from None
  except ValueError as e:  # numbers with thousands of digits raise it too
    raise UserError(f'{place} is not JSON: {e}') from None


def strictly_parsed(text: bytes) -> Json:
  """Returns the value of a JSON text whose texts are Unicode and whose numbers are finite.

  Raises ValueError if it is not JSON, is nested more than 1,024 levels deep, or has a half of a
  surrogate pair or a number that no float64 holds.
  """
  return orjson.loads(text)
