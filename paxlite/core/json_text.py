"""Parses a JSON text, which another program may have written."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

# A value of JSON: None, a bool, a number, a string, a list or an object. A union of these would ask
# every reader of a file to test the type of each value that it takes out of it.
Json = Any
JsonObject = dict[str, Json]


def parsed(text: str | bytes, unique: bool = False) -> Json:
  """Returns the value of a JSON text.

  Raises ValueError if it is not JSON, or it is nested so deeply that Python's parser gives up.

  Args:
    unique: Whether to refuse an object that has a name twice; otherwise its last value counts.
  """
  try:
    return json.loads(text, object_pairs_hook=_unique if unique else None)
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e


def _unique(pairs: list[tuple[str, Json]]) -> JsonObject:
  found: JsonObject = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f'{name} appears twice')
    found[name] = value
  return found


def number(value: object) -> float | None:
  """Returns a finite number as float; None for anything else."""
  if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
    return None
  return float(value)


def texts_in(value: Json | Mapping[str, Json]) -> Iterator[str]:
  """Yields all texts in a value of JSON."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for part in value.values():
      yield from texts_in(part)
  elif isinstance(value, list):
    for part in value:
      yield from texts_in(part)
