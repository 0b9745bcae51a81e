"""Flags in messages, quoted so that they can be pasted into sh, bash and zsh."""

import json
import pathlib
import re
import shlex
from collections.abc import Mapping

_BARE = re.compile(r'(?!(?:True|False|None)$)[A-Za-z_./][A-Za-z0-9_./+=>^$*-]*')


def flag(name: str, value: object) -> str:
  """Returns `NAME=VALUE`, in single quotes where a shell would interpret a part of it."""
  return shlex.quote(f'{name}={_text(value)}')


def flags(values: Mapping[str, object]) -> str:
  """Returns several flags, separated by spaces."""
  return ' '.join(flag(name, value) for name, value in values.items())


def _text(value: object) -> str:
  """The text of a value, as params.parse reads it; strings in a list are bare or double-quoted."""
  if not isinstance(value, list | tuple):
    return str(value)
  bare = all(isinstance(v, str) and _BARE.fullmatch(v) for v in value)
  words = [v if bare else json.dumps(v) if isinstance(v, str) else repr(v) for v in value]
  return f'[{",".join(words)}]'


def shortened(text: str, most: int = 80) -> str:
  """Returns `text`, cut after `most` characters where it is longer."""
  return text if len(text) <= most else f'{text[:most]}…'


def install(extra: str) -> str:
  """The command that installs an extra of paxlite, from the clone in use or else by name."""
  clone = pathlib.Path(__file__).parents[2]
  if (clone / 'pyproject.toml').is_file():
    return f'pip install -e {shlex.quote(f"{clone}[{extra}]")}'
  return f"pip install 'paxlite[{extra}]'"
