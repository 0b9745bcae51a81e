"""Values of keys of config.json that must be of one kind: true or false, or a count of blocks."""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.weights.known_keys import shortened


def is_on(config: Mapping[str, Json], key: str, default: bool = False) -> bool:
  """Returns a key that is true or false; null is false, as transformers takes it.

  Raises UserError if it is something else, as the text 'false', which Python would take as true.
  """
  value = config.get(key, default)
  if value is not None and not isinstance(value, bool):
    raise UserError(f'{key}={shortened(value)} must be true or false')
  return bool(value)


def interval(config: Mapping[str, Json], key: str, default: int) -> int:
  """Returns a key that says of how many blocks one is different; null is the default.

  Raises UserError if it is no integer, or less than 1.
  """
  value = config.get(key)
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise UserError(f'{key}={shortened(value)} must be an integer of at least 1')
  return value


def integer(config: Mapping[str, Json], key: str, default: int | None = None) -> int:
  """Returns a key that is an integer; a KeyError names one that is missing and has no default.

  Raises UserError if it is none.
  """
  value = config[key] if default is None else config.get(key, default)
  if isinstance(value, bool) or not isinstance(value, int):
    raise UserError(f'{key}={shortened(value)} must be an integer')
  return value
