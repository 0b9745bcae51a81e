"""Paths among the values of attributes, in a folder other than the one that they are named from."""

import glob
import os
import typing

from paxlite.config.attributes import attribute_types
from paxlite.files import paths


def placed(cls: type, name: str, value: object, folder: str) -> object:
  """Returns a value with relative paths resolved in a folder that has such files.

  Args:
    cls: A subclass of `Attributes`.
    name: The attribute; a value of one that is no path is returned as it is.
    folder: The folder in which a run was started; '': the current one.
  """
  return value if folder == os.getcwd() else absolute(cls, name, value, folder)


def absolute(cls: type, name: str, value: object, folder: str) -> object:
  """Returns what `placed` does, in the current folder too: for a comparison of two values."""
  if not is_of_paths(attribute_types(cls).get(name)):
    return value
  if isinstance(value, list):
    return [_placed(path, folder) for path in value]
  return _placed(value, folder) if isinstance(value, str) else value


def _placed(path: str, folder: str) -> str:
  name = path.rpartition(':')[2]  # sft:a.jsonl names a kind of file before its path
  there = os.path.join(folder, name)
  is_there = name and (os.path.exists(there) or glob.glob(there))
  return path.removesuffix(name) + there if is_there else path


def is_of_paths(expected: object) -> bool:
  """Returns whether an attribute's type is a path or a list of paths."""
  is_path = lambda x: x in (paths.stored, paths.local, paths.expanded) or is_of_paths(x)
  return any(map(is_path, typing.get_args(expected)))
