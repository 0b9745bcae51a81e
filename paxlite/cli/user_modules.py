"""Imports the modules that a user names, which may be in the current folder.

`python -m` puts the current folder first on sys.path, where any file could shadow the import of a
library. paxlite/__init__.py removes it. The finder of this module looks there last, and only for
modules that the user has named and for what those import.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence


class _Finder(importlib.abc.MetaPathFinder):
  """Finds modules in a folder that were named, and what they import, if nothing else finds them."""

  def __init__(self, folder: str):
    self.named: set[str] = set()
    self._found: set[str] = set()
    self._folder = folder

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if path is not None or not (fullname in self.named or _importer() in self._found):
      return None  # parts of a package are found in its own folder
    spec = importlib.machinery.PathFinder.find_spec(fullname, [self._folder])
    if spec is not None:
      self._found.add(fullname)  # what it imports may be here too
    return spec


_finder: _Finder | None = None


def import_named(name: str) -> types.ModuleType:
  """Imports a module that the user has named, from the path or from the current folder.

  Raises:
    ImportError: There is no such module.
    Exception: Whatever its code raises.
  """
  global _finder
  if _finder is None:
    _finder = _Finder(os.getcwd())
    sys.meta_path.append(_finder)
  _finder.named.add(name.partition('.')[0])
  return importlib.import_module(name)


def hidden(name: str) -> str:
  """Returns a sentence if the first package of a module is elsewhere and in the current folder too.

  Args:
    name: The dotted name of a module that was not found.
  """
  first = name.partition('.')[0]
  found = getattr(sys.modules.get(first), '__path__', None)
  here = os.path.join(os.getcwd(), first)
  if found is None or not os.path.isdir(here) or here in found:
    return ''
  return f'The installed package {first} ({next(iter(found))}) hides the folder {here}: rename it.'


def _importer() -> str:
  """Returns the first part of the name of the module whose import is looked up now."""
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None:
    name = str(frame.f_globals.get('__name__', ''))
    if name.partition('.')[0] not in ('importlib', '_frozen_importlib') and name != __name__:
      return name.partition('.')[0]
    frame = frame.f_back
  return ''
