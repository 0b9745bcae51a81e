"""Verdicts about candidates, kept in files so that the same question is answered at once."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

from paxlite.compilation.cache import cache_folder, remove_old
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import parse_line
from paxlite.files.schemes import is_address

_PATIENCE = 10.0  # seconds for which a request is tried again; then a verdict is found anew


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The memory and the time of a candidate, from the compiler or from a run.

  Attributes:
    memory: The most bytes that a device needs at a time; 0 if that is not known.
    seconds: Seconds of a step; 0 if the compiler refuses it or it was not run.
    bound: The part of the machine that most of the step waits for.
    mfu: Bounds of the model FLOPs utilization, (of its schedule, of full overlap); empty if they
      are not known.
    parts: Seconds of the parts of the step, by name.
    error: Why there is no verdict; '' if there is one.
    spent: Seconds that the verdict took.
    host: Bytes of the memory of the host that each device needs.
    note: What the figures do not show; '' if there is nothing.
  """

  memory: float = 0.0
  seconds: float = 0.0
  bound: str = ''
  mfu: tuple[float, ...] = ()
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  error: str = ''
  spent: float = 0.0
  host: float = 0.0
  note: str = ''

  def fits(self, memory: float) -> bool:
    """Returns whether the step runs with so many bytes on a device."""
    return not self.error and self.seconds > 0 and self.memory <= memory


class Folder:
  """Files of verdicts in a folder, which is made; old ones are removed."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    with contextlib.suppress(OSError):
      path.mkdir(parents=True, exist_ok=True)
      remove_old(path)

  def read(self, name: str) -> bytes:
    return (self._path / name).read_bytes()

  def write(self, name: str, content: bytes) -> None:
    unfinished = self._path / f'{name}.{os.getpid()}.unfinished'
    unfinished.write_bytes(content)
    unfinished.replace(self._path / name)


class Bucket:
  """Files of verdicts in an object store, where several people and machines share them.

  Raises:
    UserError: The store cannot be used.
  """

  def __init__(self, place: str):
    from paxlite.stores.object_store import ObjectStore
    from paxlite.stores.store_errors import reading

    self._store = ObjectStore(place, patience=_PATIENCE)
    with reading(place):
      self._store.check()

  def read(self, name: str) -> bytes:
    return self._store.read(name)

  def write(self, name: str, content: bytes) -> None:
    self._store.write(name, content)


class Store:
  """One file for each verdict; a file that cannot be read counts as missing.

  Args:
    place: Where the files are; a folder is made.
    about: What all verdicts depend on: versions, machine.
  """

  def __init__(self, place: Folder | Bucket, about: Mapping[str, object]):
    self._place = place
    self._about = about

  def get(self, values: Mapping[str, object]) -> Verdict | None:
    """Returns the verdict about an experiment with these values; None if there is none."""
    found = self.read(values)
    try:
      return None if found is None else Verdict(**{**found, 'mfu': tuple(found['mfu'])})
    except (TypeError, KeyError):
      return None

  def put(self, values: Mapping[str, object], verdict: Verdict) -> None:
    """Keeps a verdict; if it cannot be written, it is not kept."""
    self.write(values, dataclasses.asdict(verdict))

  def read(self, question: Mapping[str, object]) -> JsonObject | None:
    """Returns the answer to a question; None if there is none."""
    name = self._name(question)
    try:
      return parse_line(self._place.read(name), name)
    except (OSError, UserError):
      return None

  def write(self, question: Mapping[str, object], answer: Mapping[str, object]) -> None:
    """Keeps the answer to a question; if it cannot be written, it is not kept."""
    with contextlib.suppress(OSError, UserError):
      self._place.write(self._name(question), (json.dumps(answer) + '\n').encode())

  def _name(self, question: Mapping[str, object]) -> str:
    text = json.dumps([self._about, dict(question)], sort_keys=True, default=str)
    return f'{hashlib.sha256(text.encode()).hexdigest()[:32]}.json'


def own_place() -> Folder:
  """Returns the folder of the verdicts of this user."""
  return Folder(cache_folder() / 'plans')


def place_at(text: str | None) -> Folder | Bucket:
  """Returns the place at a path or an address; None: that of this user.

  Raises:
    UserError: The store cannot be used.
  """
  if text is None:
    return own_place()
  return Bucket(text) if is_address(text) else Folder(pathlib.Path(text))


@functools.cache
def code(*packages: str) -> str:
  """Returns a sum of the code of packages; by default of those that decide compiled programs."""
  found = hashlib.sha256()
  package = pathlib.Path(__file__).parents[2]
  for name in packages or _COMPILED:
    for path in sorted((package / name).rglob('*.py')):
      found.update(path.read_bytes())
  return found.hexdigest()[:16]


_COMPILED = (
  'aot', 'compilation', 'config', 'core', 'experiments', 'layers', 'losses', 'optim', 'parallel',
  'training',
)  # fmt: skip
