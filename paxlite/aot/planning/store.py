"""Verdicts about candidates, kept in files so that the same question is answered at once."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_files import parse_line
from paxlite.runtime.kept_programs import cache_folder, remove_old


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
    """Whether the step runs with so many bytes on a device."""
    return not self.error and self.seconds > 0 and self.memory <= memory


class Store:
  """A folder with one file for each verdict; a file that cannot be read counts as missing."""

  def __init__(self, folder: pathlib.Path, about: Mapping[str, Any]):
    """Makes the folder.

    Args:
      folder: The folder.
      about: What all verdicts depend on: versions, machine.
    """
    self._folder = folder
    self._about = about
    with contextlib.suppress(OSError):
      folder.mkdir(parents=True, exist_ok=True)
      remove_old(folder)

  def get(self, values: Mapping[str, Any]) -> Verdict | None:
    """The verdict about an experiment with these values; None if there is none."""
    found = self.read(values)
    try:
      return None if found is None else Verdict(**{**found, 'mfu': tuple(found['mfu'])})
    except (TypeError, KeyError):
      return None

  def put(self, values: Mapping[str, Any], verdict: Verdict) -> None:
    """Keeps a verdict; if the disk is full, it is not kept."""
    self.write(values, dataclasses.asdict(verdict))

  def read(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer to a question; None if there is none."""
    path = self._path(question)
    try:
      return parse_line(path.read_bytes(), str(path))
    except (OSError, UserError):
      return None

  def write(self, question: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Keeps the answer to a question; if the disk is full, it is not kept."""
    path = self._path(question)
    unfinished = path.with_suffix(f'.{os.getpid()}.unfinished')
    with contextlib.suppress(OSError):
      unfinished.write_text(json.dumps(answer) + '\n')
      unfinished.replace(path)

  def _path(self, question: Mapping[str, Any]) -> pathlib.Path:
    text = json.dumps([self._about, dict(question)], sort_keys=True, default=str)
    return self._folder / f'{hashlib.sha256(text.encode()).hexdigest()[:32]}.json'


def plans_folder() -> pathlib.Path:
  """The folder of the verdicts of this user."""
  return cache_folder() / 'plans'


@functools.cache
def code(*rooms: str) -> str:
  """A sum of the code of rooms; by default of those that decide compiled programs."""
  found = hashlib.sha256()
  package = pathlib.Path(__file__).parents[2]
  for room in rooms or _COMPILED:
    for path in sorted((package / room).glob('*.py')):
      found.update(path.read_bytes())
  return found.hexdigest()[:16]


_COMPILED = ('aot', 'experiments', 'layers', 'optim', 'parallel', 'training')
