"""Calls a user's functions in a separate process.

It reads a JSON line {"path": …, "method": … or null, "arguments": […]} after another from its
input, and answers each with {"result": …} or {"error": …}. Without arguments, a function is found
and not called. What the functions print goes to the standard error, because answers are written
where the standard output was. They and the processes that they start find an empty standard input.
"""

import importlib
import json
import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import paxlite
from paxlite.cli.user_modules import import_named
from paxlite.core.child_processes import end_group_with_parent
from paxlite.core.json_text import parsed

_MOST_CHARS = 2000  # of what an error says


def main() -> None:
  end_group_with_parent()  # also while a function of the user goes on
  own = os.getpid()
  answers = os.fdopen(os.dup(1), 'w', encoding='utf-8')
  os.dup2(2, 1)
  calls = os.fdopen(os.dup(0), encoding='utf-8')
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  known: dict[str, Any] = {}
  for line in calls:
    call = parsed(line)
    try:
      function = _function(known, call['path'], call['method'])
      given = call['arguments']
      text = json.dumps({'result': None if given is None else function(*given)}, default=float)
    except BaseException as e:
      if isinstance(e, KeyboardInterrupt):
        return
      text = json.dumps({'error': f'{type(e).__name__}: {_said(e)}{_place(e)}'})
    if os.getpid() != own:
      os._exit(0)  # the function has forked, and its process answers
    answers.write(text + '\n')
    answers.flush()


def _said(error: BaseException) -> str:
  """Returns what an error says, on one line; nothing if it cannot say it."""
  try:
    return ' '.join(str(error)[:_MOST_CHARS].split())
  except Exception:
    return ''


def _place(error: BaseException) -> str:
  """Returns the file and line of the user's code where an error comes from; '' if of none."""
  folders = pathlib.Path(paxlite.__file__).parent, os.path.dirname(importlib.__file__)
  others = *(f'{folder}{os.sep}' for folder in folders), '<frozen'
  own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
  return f' ({os.path.basename(own[-1].filename)}:{own[-1].lineno})' if own else ''


def _function(known: dict[str, Any], path: str, method: str | None) -> Callable[..., Any]:
  """Returns a function, or a method of an object of a class, by its dotted path."""
  if path not in known:
    module, _, name = path.rpartition('.')
    found = getattr(import_named(module), name)
    known[path] = found() if isinstance(found, type) else found
  function: Callable[..., Any] = known[path] if method is None else getattr(known[path], method)
  return function


if __name__ == '__main__':
  main()
