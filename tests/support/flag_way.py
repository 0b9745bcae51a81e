"""python -m tests.support.flag_way NAME TEXT MODULE [ARGUMENTS …]

Runs `python -m MODULE ARGUMENTS` up to the moment at which the task of its run is built, and prints
the files of paxlite through which the value of an attribute goes until then, as JSON.

They are those of the functions that get the value, or its text, and return it or keep it, alone or
within arguments, options or a config; of the methods of the experiment that return a config with
it; of what calls these, as it stands where the task is built; and of the object that has it then.
Functions that only look at the value, to check or to print it, are not on its way.
"""

import argparse
import functools
import inspect
import json
import pathlib
import sys
import types

import fiddle as fdl

import paxlite.__main__
from paxlite import main
from paxlite.config.attributes import Attributes
from paxlite.programs import run

PACKAGE = pathlib.Path(paxlite.__file__).parent
PROGRAMS = {'paxlite': paxlite.__main__.main, 'paxlite.main': lambda: main.run(sys.argv[1:])}
USERS = {
  'LEARNING_RATE': lambda task: task.optimizer.schedule,
  'NUM_LAYERS': lambda task: task.model.transformer_tpl.func,
}


class Way:
  """A profiler that notes the files through which the value of an attribute goes."""

  def __init__(self, name: str, text: str):
    self.name, self.text, self.value = name, text, float(text)
    self.files: dict[str, None] = {}
    self._taking: dict[types.FrameType, tuple[bool, bool]] = {}

  def __call__(self, frame: types.FrameType, event: str, returned: object) -> None:
    code = frame.f_code
    if event == 'call' and self.is_ours(code) and code.co_flags & inspect.CO_OPTIMIZED:
      count = code.co_argcount + code.co_kwonlyargcount
      count += sum(bool(code.co_flags & f) for f in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
      found = frame.f_locals
      arguments = [found.get(argument) for argument in code.co_varnames[:count]]
      self._taking[frame] = any(map(self._holds, arguments)), self._has(found.get('self'))
    elif event == 'return' and frame in self._taking:
      (took, had), owner = self._taking.pop(frame), frame.f_locals.get('self')
      is_kept = self._has(owner) and not had
      is_made = isinstance(owner, Attributes) and isinstance(returned, fdl.Buildable)
      is_given = self._holds(returned) and (took or is_made)
      if is_given or (took and (is_kept or self._has(returned))):
        self.add(code)

  def _has(self, owner: object) -> bool:
    return isinstance(owner, Attributes) and self.name in vars(owner)

  def _holds(self, x: object) -> bool:
    match x:
      case str():
        return x == self.text or x.endswith(f'={self.text}')
      case int() | float():
        return x == self.value
      case dict():
        return any(map(self._holds, x.values()))
      case list() | tuple():
        return any(map(self._holds, x))
      case argparse.Namespace():
        return self._holds(vars(x))
      case fdl.Buildable():
        return self._holds(x.__arguments__)
    return False

  def is_ours(self, code: types.CodeType) -> bool:
    return code.co_filename.startswith(f'{PACKAGE}/')

  def add(self, code: types.CodeType) -> None:
    self.files[str(pathlib.Path(code.co_filename).relative_to(PACKAGE))] = None

  def end(self, task: object, *_: object) -> None:
    """Stands in the place of what takes the task that a run has built."""
    sys.setprofile(None)
    user = USERS[self.name](task)
    self.files[str(pathlib.Path(inspect.getsourcefile(user) or '').relative_to(PACKAGE))] = None
    frame = sys._getframe(1)
    while frame is not None:
      if self.is_ours(frame.f_code):
        self.add(frame.f_code)
      frame = frame.f_back
    print(json.dumps(sorted(self.files)), flush=True)
    raise SystemExit


if __name__ == '__main__':
  name, text, module, *arguments = sys.argv[1:]
  way = Way(name, text)
  run.ShardedTask = functools.partial(way.end)
  sys.argv = [module, *arguments]
  sys.setprofile(way)
  PROGRAMS[module]()
