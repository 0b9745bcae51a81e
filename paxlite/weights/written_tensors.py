"""The tensors of another format, made of the variables of paxlite when they are written."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from paxlite.checkpointing.variables import Variable, blocks
from paxlite.weights.tensor_entries import Entry


class VariableReader:
  """Reads variables, and keeps the last one, as several tensors may be parts of one variable."""

  def __init__(self, variables: Mapping[str, Variable]):
    self._variables = variables
    self._last, self._name = np.empty(0), ''

  def __call__(self, name: str) -> np.ndarray:
    if name != self._name:
      self._last, self._name = self._variables[name].whole(), name
    return self._last


def written_tensor(entries: list[Entry], read: Callable[[str], np.ndarray]) -> np.ndarray:
  """Returns the elements of a tensor that the variables of `entries` make up, in its order."""
  views = []
  for entry in entries:
    value = read(entry.ours)
    views.append(entry.to_theirs(value if entry.part is None else value[entry.part]))
  if len(entries) == 1:
    return views[0]
  whole = np.empty(entries[0].shape, views[0].dtype)
  for entry, view in zip(entries, views, strict=True):
    part = entry.view(whole)
    part[...] = view.reshape(part.shape)
  return whole


def entries_by_tensor(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
  """Returns entries by the names of their tensors."""
  found: dict[str, list[Entry]] = {}
  for entry in entries:
    found.setdefault(entry.theirs, []).append(entry)
  return found


def written_blocks(
  entries: list[Entry], read: Callable[[str], np.ndarray], dtype: np.dtype
) -> Iterator[bytes | memoryview]:
  """Yields the elements of a written_tensor in C order, in a dtype, some megabytes at a time."""
  value = written_tensor(entries, read)
  for block in blocks(value):
    is_same = value.dtype == dtype
    yield block if is_same else np.frombuffer(block, value.dtype).astype(dtype).tobytes()
