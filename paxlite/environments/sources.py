"""Names of tasks in the place of files: reasoning_gym:chain_sum?size=1000&seed=1.

What is behind the colon names a task of reasoning-gym or a taskset of verifiers, and what is behind
the question mark are options. Its prompts are written to a file of the user's cache folder, at each
start and by a process of its own.
"""

import functools
import importlib.util
import json
import os
import pathlib
import platform
import re
import urllib.parse
import zlib
from typing import Any

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed
from paxlite.finetuning.reinforcement.user_processes import IMPORT_SECONDS, Call, UserProcesses

_SOURCE = re.compile(r'(reasoning_gym|verifiers):([^?]+)(?:\?(.*))?')


@functools.cache
def files_of(text: str) -> list[str]:
  """Returns the file with the prompts of a task; [] if the text names none.

  Raises:
    UserError: The package is missing, or has no such task or option.
  """
  match = _SOURCE.fullmatch(text)
  if match is None:
    return []
  package, name = match[1], match[2]
  if importlib.util.find_spec(package) is None:
    raise UserError(f'{text} needs the package {package}: {shell.install("rl")}')
  base = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser()
  slug = re.sub(r'[^A-Za-z0-9_-]+', '_', name)
  path = base / f'paxlite/environments/{package}-{slug}-{zlib.crc32(text.encode()):08x}.jsonl'
  processes = UserProcesses(1, IMPORT_SECONDS)
  try:
    given = [name, _options(text, match[3] or ''), str(path)]
    processes.results([Call(f'paxlite.environments.{package}.write', None, given, text)])
  finally:
    processes.close()
  return [str(path)]


def write_records(path: str, records: list[dict[str, Any]]) -> None:
  """Writes prompts as JSON lines, all or nothing."""
  file = pathlib.Path(path)
  file.parent.mkdir(parents=True, exist_ok=True)
  # machines that share a home folder may have processes of the same number
  part = file.with_name(f'{file.name}.{platform.node()}.{os.getpid()}')
  part.write_text(''.join(json.dumps(record, default=str) + '\n' for record in records))
  part.replace(file)


def _options(text: str, query: str) -> dict[str, Any]:
  """Returns options by name; a dot in a name is a level, as in task.level=3."""
  found: dict[str, Any] = {}
  try:
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
  except ValueError:
    raise UserError(f'{text}: options are NAME=VALUE, with & between them') from None
  for name, value in pairs:
    *levels, last = name.split('.')
    into: Any = found
    for level in levels:
      into = into.setdefault(level, {}) if isinstance(into, dict) else None
    if not all([*levels, last]) or not isinstance(into, dict) or last in into:
      raise UserError(
        f'{text}: the option {name!r} is empty, or given twice: NAME=VALUE, once each'
      )
    try:
      into[last] = parsed(value)
    except ValueError:
      into[last] = value
  return found
