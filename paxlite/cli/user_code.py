"""Finds a user's own code in an exception, and reports it in a few lines instead of a traceback."""

import contextlib
import dataclasses
import functools
import inspect
import linecache
import os
import pathlib
import re
import site
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Iterator

from paxlite.cli.terminal import warn
from paxlite.core import errors
from paxlite.core.run_files import write_file

FULL = 'PAXLITE_TRACEBACK'  # the variable of the environment that asks for whole tracebacks

_FOLDERS = ('stdlib', 'platstdlib', 'purelib', 'platlib', 'scripts')
_PACKAGE = str(pathlib.Path(__file__).resolve().parents[1]) + os.sep
# what Python says of a call whose arguments do not fit: the name is that of the function
_BAD_CALL = re.compile(r'([\w.<>]+)\(\) (takes|missing|got an unexpected|got multiple|got some)')
_INCOMPLETE = re.compile(r"Can't instantiate abstract class (\w+)")
_LONGEST = 300  # characters of a message


@dataclasses.dataclass(frozen=True)
class Frame:
  """A line of code."""

  file: str  # the path of its file
  line: int  # its number
  function: str = ''  # the function that it is in; '' for a module

  @classmethod
  def of(cls, frame: types.FrameType, line: int) -> 'Frame':
    name = frame.f_code.co_qualname
    return cls(frame.f_code.co_filename, line, '' if name == '<module>' else name)

  def __str__(self) -> str:
    return f'{self.file}, line {self.line}' + (f', in {self.function}' if self.function else '')

  @property
  def code(self) -> str:
    """The text of the line; '' if the file cannot be read."""
    return linecache.getline(self.file, self.line).strip()


def place_of(function: Callable[..., object]) -> str:
  """Returns the file and the line where a function or method is defined, as far as is known."""
  function = getattr(function, '__func__', function)
  code = _code_of(function)
  return f'{code.co_filename}, line {code.co_firstlineno}' if code else repr(function)


def is_own(file: str) -> bool:
  """Returns whether a file is the user's: neither paxlite's, nor installed, nor Python's."""
  if file.startswith('<'):
    return False
  return not os.path.realpath(file).startswith((_PACKAGE, *_installed()))


def frame_of(error: BaseException) -> Frame | None:
  """Returns the innermost line of the user's own code in an exception; None if there is none.

  Exceptions that caused it are looked through too. An error of syntax, and a call that does not fit
  the definition of a function of the user's, name their place themselves. If paxlite's own code has
  failed in a method of an object of the user's class, such as a layer that returns a wrong shape,
  it is the line of the class.
  """
  seen: set[int] = set()
  current: BaseException | None = error
  while current is not None and id(current) not in seen:
    seen.add(id(current))
    if isinstance(current, SyntaxError) and current.filename and is_own(current.filename):
      return Frame(current.filename, current.lineno or 0)
    if found := _called(current) or _incomplete_class(current):
      return found
    own = [Frame.of(f, line) for f, line in _frames(current) if is_own(f.f_code.co_filename)]
    if own:
      return own[-1]
    if found := _class_of_object(current):
      return found
    current = current.__cause__ or current.__context__
  return None


def innermost(frames: Iterable[Frame]) -> Frame | None:
  """Returns the first of these frames that is the user's, or else paxlite's; None if none is."""
  known = list(frames)
  ours = (frame for frame in known if _is_ours(frame.file))
  return next((frame for frame in known if is_own(frame.file)), next(ours, None))


def report(error: BaseException, whole: str = '') -> list[str] | None:
  """Returns at most eight lines on an exception that came out at the user's own code.

  They say where it came out, what it is, what paxlite did, and how to see the whole traceback. None
  if no line of the user's is in it, or if the environment asks for whole tracebacks.

  Args:
    whole: Where its whole traceback is; '': nowhere.
  """
  frame = frame_of(error)
  if frame is None or os.environ.get(FULL, '0') != '0':
    return None
  lines = [f'stopped by an error at {frame}']
  if frame.code:
    lines.append(f'    {frame.code[:_LONGEST]}')
  message = [line.strip() for line in str(error).splitlines() if line.strip()]
  if isinstance(error, SyntaxError):
    message = [str(error.msg)]
  lines.append(f'{type(error).__name__}: {" ".join(message[:2])[:_LONGEST]}'.rstrip(': '))
  if doing := errors.work_of(error):
    lines.append(f'paxlite was at: {doing}')
  if ours := [Frame.of(f, n) for f, n in _frames(error) if _is_ours(f.f_code.co_filename)]:
    lines.append(f'the last line of paxlite was {ours[-1]}')
  whole = f'is in {whole}' if whole else f'is shown with {FULL}=1'
  return [*lines, f'The whole traceback {whole}.']


def print_error(error: BaseException, defect: str, folder: pathlib.Path | None = None) -> None:
  """Prints an exception: in a few lines if it came out at the user's own code, or its traceback.

  Args:
    defect: What is said after the traceback of an error that is paxlite's.
    folder: A folder for the file traceback.txt, if it exists.
  """
  path = ''
  if folder is not None and folder.is_dir() and report(error) is not None:
    with contextlib.suppress(OSError):
      text = ''.join(traceback.format_exception(error))
      write_file(folder / 'traceback.txt', text.encode('utf-8', 'replace'))
      path = str(folder / 'traceback.txt')
  lines = report(error, path)
  if lines is None:
    traceback.print_exception(error)
    lines = [defect] if frame_of(error) is None else []
  for line in lines:
    warn(line)


def _frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
  return list(traceback.walk_tb(error.__traceback__))


def _called(error: BaseException) -> Frame | None:
  """Returns the definition of the user's function that was called with arguments it lacks.

  Such a call raises an error in the caller, so that no line of the function is in the traceback.
  """
  match = _BAD_CALL.match(str(error)) if isinstance(error, TypeError) else None
  frames = _frames(error)
  if match is None or (frames and is_own(frames[-1][0].f_code.co_filename)):
    return None
  *_, name = match[1].split('.')
  values = [x for frame, _ in frames[-2:] for x in frame.f_locals.values()]
  candidates = [getattr(type(x), name, None) for x in values] + values
  for module in list(sys.modules.values()):
    if isinstance(module, types.ModuleType) and is_own(getattr(module, '__file__', '') or '<'):
      candidates.append(_member(module, match[1]))
  for candidate in candidates:
    code = _code_of(candidate)
    if code is not None and code.co_qualname == match[1] and is_own(code.co_filename):
      return Frame(code.co_filename, code.co_firstlineno, code.co_qualname)
  return None


def _incomplete_class(error: BaseException) -> Frame | None:
  """Returns the line of the user's class that lacks a method, of which an object was to be made."""
  match = _INCOMPLETE.match(str(error)) if isinstance(error, TypeError) else None
  if match is None:
    return None
  for module in list(sys.modules.values()):
    if isinstance(module, types.ModuleType) and is_own(getattr(module, '__file__', '') or '<'):
      found = _class_line(_member(module, match[1]))
      if found is not None:
        return found
  return None


def _class_line(cls: object) -> Frame | None:
  """Returns the line of a class, if it is the user's and its source can be read."""
  file = getattr(sys.modules.get(getattr(cls, '__module__', '')), '__file__', None) or '<'
  if isinstance(cls, type) and is_own(file):
    with contextlib.suppress(OSError, TypeError):
      return Frame(file, inspect.getsourcelines(cls)[1], cls.__qualname__)
  return None


def _class_of_object(error: BaseException) -> Frame | None:
  """Returns the line of the user's class that was called last, experiments aside.

  A layer may have returned what the layer of paxlite around it cannot use. That one holds a
  template of the class.
  """
  from paxlite.config.attributes import Attributes

  frames = [f for f, _ in reversed(_frames(error)) if _is_ours(f.f_code.co_filename)]
  objects = [frame.f_locals.get('self') for frame in frames]
  held = [x for holder in objects[:1] for x in getattr(holder, '__dict__', {}).values()]
  around = [cls for x in held for cls in _classes_in(x)]
  for cls in [*map(type, objects[:1]), *around, *map(type, objects[1:])]:
    if not issubclass(cls, Attributes) and (found := _class_line(cls)) is not None:
      return found
  return None


def _classes_in(template: object) -> Iterator[type]:
  """Yields the class that a template makes objects of, and those of the templates in it."""
  if isinstance(template, functools.partial):
    if isinstance(template.func, type):
      yield template.func
    for value in template.keywords.values():
      yield from _classes_in(value)


def _code_of(value: object) -> types.CodeType | None:
  """Returns the code of a function, without its decorators; None for other values."""
  try:
    code = getattr(inspect.unwrap(value), '__code__', None) if callable(value) else None
  except Exception:  # of an object that answers for any name, such as a mock or a lazy module
    return None
  return code if isinstance(code, types.CodeType) else None


def _member(module: types.ModuleType, qualname: str) -> object:
  found: object = module
  for name in qualname.split('.'):
    found = vars(found).get(name) if hasattr(found, '__dict__') else None
  return found


def _is_ours(file: str) -> bool:
  return os.path.realpath(file).startswith(_PACKAGE)


@functools.cache
def _installed() -> tuple[str, ...]:
  """Returns the folders of Python and of installed packages, in which no code is the user's."""
  folders = {sysconfig.get_path(name) for name in _FOLDERS}
  folders |= {*site.getsitepackages(), site.getusersitepackages()}
  return tuple(os.path.realpath(folder) + os.sep for folder in folders if folder)
