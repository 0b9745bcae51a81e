"""Reads an object that others have made, and remembers which of its fields were read.

A reader that takes out what it knows drops the rest without a word. So readers of records, requests
and files of others take values out of Fields, which say at the end what nobody has read.
"""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json


class Fields:
  """The fields of an object; null counts as absent.

  Args:
    given: The object.
    name: What it is called in messages, such as 'messages[2]'; '' for a whole record.
  """

  def __init__(self, given: Mapping[str, Json], name: str = ''):
    self._given, self._name = given, name
    self._read: set[str] = set()
    self._inner: list[Fields] = []

  def __contains__(self, key: str) -> bool:
    return self._given.get(key) is not None

  def keys(self) -> list[str]:
    """Returns the names of the fields that have a value."""
    return [key for key, value in self._given.items() if value is not None]

  def values(self) -> dict[str, Json]:
    """Returns the fields that have a value, without taking them for read."""
    return {key: value for key, value in self._given.items() if value is not None}

  def get(self, key: str) -> Json:
    """Returns the value of a field; None if there is none."""
    self._read.add(key)
    return self._given.get(key)

  def one_of(self, *keys: str) -> Json:
    """Returns the value of the one of several names for a field that is given; None: none is.

    Raises UserError if two of them are given, with values that differ.
    """
    found = [(key, value) for key in keys if not is_empty(value := self.get(key))]
    for key, value in found[1:]:
      if value != found[0][1]:
        raise UserError(
          f'{self._label(found[0][0])} and {self._label(key)} contradict each other: leave one out'
        )
    return found[0][1] if found else None

  def text(self, *keys: str) -> str:
    """Returns the text of a field, which may have one of several names; '' if there is none.

    Raises UserError if it is no text.
    """
    value = self.one_of(*keys)
    if value is not None and not isinstance(value, str):
      found = next(key for key in keys if not is_empty(self._given.get(key)))
      raise UserError(f'{self._label(found)} must be a string')
    return value or ''

  def object(self, value: Json, name: str) -> 'Fields':
    """Returns the fields of an object within this one; what is not read there counts here, too.

    Raises UserError if it is no object.
    """
    if not isinstance(value, Mapping):
      raise UserError(f'{name} must be an object, not {type(value).__name__}')
    inner = Fields(value, name)
    self._inner.append(inner)
    return inner

  def unread(self) -> list[str]:
    """Returns the names of fields with a value that nobody has read, those within objects last.

    Their names are as 'topic' and 'messages.score', whichever of the messages has it.
    """
    found = dict.fromkeys(key for key, value in self.left().items() if not is_empty(value))
    for inner in self._inner:
      base = inner._name.partition('[')[0]
      found |= dict.fromkeys(f'{base}.{key}' for key in inner.unread())
    return list(found)

  def left(self) -> dict[str, Json]:
    """Returns the fields that nobody has read, but those that are null, and none within objects."""
    return {k: v for k, v in self._given.items() if k not in self._read and v is not None}

  def _label(self, key: str) -> str:
    return f'{key!r} of {self._name}' if self._name else f'{key!r}'


def is_empty(value: Json) -> bool:
  """Whether a value says nothing, as tables have '' and [] where other rows have something."""
  return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)
