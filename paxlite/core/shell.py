"""Flags in messages, quoted so that they can be pasted into sh, bash and zsh."""

import json
import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r'(?!(?:True|False|None)$)[A-Za-z_./][A-Za-z0-9_./+=>^$*-]*')


def flag(name: str, value: Any) -> str:
  """`--fdl.NAME=VALUE`, in single quotes where a shell would take a part of it for its own."""
  return shlex.quote(f'--fdl.{name}={_text(value)}')


def flags(values: Mapping[str, Any]) -> str:
  """Several of them."""
  return ' '.join(flag(name, value) for name, value in values.items())


def _text(value: Any) -> str:
  """A value as params.parse reads it; strings in a list are bare, or in double quotes."""
  if not isinstance(value, list | tuple):
    return str(value)
  bare = all(isinstance(v, str) and _BARE.fullmatch(v) for v in value)
  words = [v if bare else json.dumps(v) if isinstance(v, str) else repr(v) for v in value]
  return f'[{",".join(words)}]'


def shortened(text: str, most: int = 80) -> str:
  """`text`, cut to its beginning where it is long."""
  return text if len(text) <= most else f'{text[:most]}…'


def install(extra: str) -> str:
  """The command that installs an extra of paxlite: of the clone that it runs from, or by name."""
  clone = pathlib.Path(__file__).parents[2]
  if (clone / 'pyproject.toml').is_file():
    return f'pip install -e {shlex.quote(f"{clone}[{extra}]")}'
  return f"pip install 'paxlite[{extra}]'"
