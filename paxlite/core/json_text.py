"""Parses a JSON text, which another program may have written."""

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
  """Returns the value of a JSON text.

  Raises:
    ValueError: It is not JSON, or it is nested so deeply that Python's parser gives up.
  """
  try:
    return json.loads(text)
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e
