"""Verdicts about candidates, kept in files so that the same question is answered at once."""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from paxlite.compilation.cache import cache_folder, remove_old
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import parse_line
from paxlite.files.schemes import is_address

if TYPE_CHECKING:
  from paxlite.stores.object_store import ObjectStore

_PATIENCE = 10.0  # seconds for which a request is tried again; then a verdict is found anew
# the packages that decide compiled programs
_COMPILED = (
  'aot', 'compilation', 'config', 'context_parallelism', 'core', 'experiments', 'layers', 'losses',
  'optim', 'parallel', 'pipeline', 'training', 'transformer_engine',
)  # fmt: skip


class Verdict(NamedTuple):
  """The memory and the time of a candidate, from the compiler or from a run."""

  memory: float = 0.0  # the most bytes that a device needs at a time; 0 if that is not known
  seconds: float = 0.0  # of a step; 0 if the compiler refuses it or it was not run
  bound: str = ''  # what most of the step waits for
  mfu: tuple[float, ...] = ()  # of its schedule, and if everything overlapped
  parts: Mapping[str, float] = {}  # seconds by name
  error: str = ''  # why there is no verdict
  spent: float = 0.0  # seconds that the verdict took
  host: float = 0.0  # bytes of the memory of the host that each device needs
  note: str = ''  # what the figures do not show

  def fits(self, memory: float) -> bool:
    """Returns whether the step runs with so many bytes on a device."""
    return not self.error and self.seconds > 0 and self.memory <= memory


class Store:
  """One file for each verdict; a file that cannot be read counts as missing.

  They are in a folder, from which old ones are removed, or in an object store; by default in the
  folder of this user. `about` is what all verdicts depend on: versions, machine.

  Raises:
    UserError: The object store cannot be used.
  """

  def __init__(self, place: str | None, about: Mapping[str, object]):
    self._about = about
    self._objects = _shared(place) if place is not None and is_address(place) else None
    if self._objects is not None:
      return
    self._folder = cache_folder() / 'plans' if place is None else pathlib.Path(place)
    with contextlib.suppress(OSError):
      self._folder.mkdir(parents=True, exist_ok=True)
      remove_old(self._folder)

  def get(self, values: Mapping[str, object]) -> Verdict | None:
    """Returns the verdict about an experiment with these values; None if there is none."""
    found = self.read(values)
    with contextlib.suppress(TypeError, KeyError):
      return None if found is None else Verdict(**{**found, 'mfu': tuple(found['mfu'])})
    return None

  def read(self, question: Mapping[str, object]) -> JsonObject | None:
    """Returns the answer to a question; None if there is none."""
    name = self._name(question)
    with contextlib.suppress(OSError, UserError):
      if self._objects is None:
        return parse_line((self._folder / name).read_bytes(), name)
      return parse_line(self._objects.read(name), name)
    return None

  def write(self, question: Mapping[str, object], answer: Mapping[str, object]) -> None:
    """Keeps the answer to a question, or a verdict; if it cannot be written, it is not kept."""
    name, content = self._name(question), (json.dumps(answer) + '\n').encode()
    with contextlib.suppress(OSError, UserError):
      if self._objects is not None:
        self._objects.write(name, content)
        return
      unfinished = self._folder / f'{name}.{os.getpid()}.unfinished'
      unfinished.write_bytes(content)
      unfinished.replace(self._folder / name)

  def _name(self, question: Mapping[str, object]) -> str:
    text = json.dumps([self._about, dict(question)], sort_keys=True, default=str)
    return f'{hashlib.sha256(text.encode()).hexdigest()[:32]}.json'


def _shared(place: str) -> 'ObjectStore':
  from paxlite.stores.object_store import ObjectStore
  from paxlite.stores.store_errors import reading

  found = ObjectStore(place, patience=_PATIENCE)
  with reading(place):
    found.check()
  return found


@functools.cache
def code(*packages: str) -> str:
  """Returns a sum of the code of packages; by default of those that decide compiled programs."""
  found = hashlib.sha256()
  package = pathlib.Path(__file__).parents[2]
  for name in packages or _COMPILED:
    for path in sorted((package / name).rglob('*.py')):
      found.update(path.read_bytes())
  return found.hexdigest()[:16]
