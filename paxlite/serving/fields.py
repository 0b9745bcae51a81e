"""Reads the fields of a request's body, each with its kind and its bounds."""

from collections.abc import Collection, Mapping
from typing import Any

from paxlite.core import fields
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.near_names import did_you_mean
from paxlite.files.json_files import strictly_parsed
from paxlite.serving.errors import ApiError

_DEPTH = 64  # levels of lists and objects
_MOST_VALUES = 1_000_000  # of a body, with those in lists and objects


def body_of(raw: bytes) -> JsonObject:
  """Returns the object of a body.

  Its texts are Unicode, without halves of surrogate pairs, and its numbers fit into 64 bits. Raises
  ApiError if it is not JSON, or no object, or far larger than any request.
  """
  # the parser lets no other thread run; a text with so many commas is longer than any context
  if raw.count(b',') + raw.count(b'{') + raw.count(b'[') > 2 * _MOST_VALUES:
    raise ApiError(f'The body has more than {_MOST_VALUES:,} values', code='too_large', status=413)
  try:
    body = strictly_parsed(raw)
  except ValueError as e:
    raise ApiError(f'The body is not JSON: {str(e)[:200]}') from None
  if not isinstance(body, dict):
    raise ApiError('The body must be a JSON object')
  _check_size(body)
  return body


def _check_size(body: JsonObject) -> None:
  """Raises ApiError if an object has too many values, or too many levels."""
  count, level, depth = 0, list[Json]([body]), 0
  while level:
    below: list[Json] = []
    for part in level:
      count += len(part)
      inner = part.values() if isinstance(part, dict) else part
      below += [x for x in inner if isinstance(x, dict | list)]
      if count > _MOST_VALUES:
        message = f'The body has more than {_MOST_VALUES:,} values'
        raise ApiError(message, code='too_large', status=413)
    level, depth = below, depth + 1
    if depth > _DEPTH:
      raise ApiError(f'The body has more than {_DEPTH} levels')


class RequestFields(fields.Fields):
  """The body of a request.

  Args:
    ignored: Names of fields that change nothing here.
    refused: Fields that are not supported, and the values with which they change nothing.
  """

  def __init__(
    self, body: JsonObject, ignored: Collection[str], refused: Mapping[str, Collection[Any]]
  ):
    super().__init__(body)
    self._ignored, self._refused = ignored, refused

  def get(self, key: str, default: Any = None) -> Any:
    """Returns the value of a field, or the default; null counts as absent."""
    value = super().get(key)
    return default if value is None else value

  def number(self, name: str, default: float, least: float, most: float) -> float:
    """Returns a number within bounds, or the default."""
    value = self.get(name)
    if value is None:
      return default
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ApiError(f'{name} must be a number', name)
    if not least <= value <= most:
      raise ApiError(f'{name}={value:g} must be from {least:g} to {most:g}', name)
    return float(value)

  def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
    """Returns a whole number within bounds, or the default."""
    value = self.get(name)
    if value is None:
      return default
    if isinstance(value, bool) or not isinstance(value, int):
      raise ApiError(f'{name} must be a whole number', name)
    if not least <= value <= most:
      raise ApiError(f'{name}={value} must be from {least:,} to {most:,}', name)
    return value

  def flag(self, name: str, default: bool = False) -> bool:
    """Returns true or false."""
    value = self.get(name, default)
    if not isinstance(value, bool):
      raise ApiError(f'{name} must be true or false', name)
    return value

  def texts(self, name: str, most: int) -> list[str]:
    """Returns a text or a list of texts as a list."""
    value = self.get(name, [])
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(x, str) and x for x in found):
      raise ApiError(f'{name} must be a text or a list of texts, none of them empty', name)
    if len(found) > most:
      raise ApiError(f'{name} has {len(found)} texts; at most {most} are possible', name)
    return found

  def integers(self, name: str, most: int) -> list[int]:
    """Returns a list of whole numbers."""
    found = self.get(name, [])
    is_integer = lambda x: isinstance(x, int) and not isinstance(x, bool)
    if not isinstance(found, list) or not all(map(is_integer, found)):
      raise ApiError(f'{name} must be a list of whole numbers', name)
    if len(found) > most:
      raise ApiError(f'{name} has {len(found)} numbers; at most {most} are possible', name)
    return found

  def check_all_read(self) -> None:
    """Raises ApiError if the body has an unknown or unsupported field."""
    for name, value in self.left().items():
      if name in self._ignored:
        continue
      if name not in self._refused:
        known = [*self._read, *self._ignored, *self._refused]
        hint = did_you_mean(name, known)
        raise ApiError(f'Unrecognized request argument supplied: {name}. {hint}'.rstrip(), name)
      if value not in self._refused[name]:
        raise ApiError(f'{name} is not supported', name, 'unsupported_value')
