"""Verdicts about candidates, kept in files so that the same question is answered at once."""

import contextlib
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from paxlite.compilation.cache import cache_folder, remove_old
from paxlite.core.errors import UnreadableError, UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import parse_line
from paxlite.files.output import write_output
from paxlite.files.schemes import content_of, is_address, scheme_of

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

  They are in a folder, from which old ones are removed, or at an address; by default in the folder
  of this user. `about` is what all verdicts depend on: versions, machine.

  Raises:
    UserError: The address cannot be used.
  """

  def __init__(self, place: str | None, about: Mapping[str, object]):
    self._about, self._place = about, place or str(cache_folder() / 'plans')
    self._answers = True  # a store that has failed once would be waited for again and again
    if is_address(self._place):
      scheme_of(self._place).exists(self._place)
    else:
      with contextlib.suppress(OSError):
        remove_old(pathlib.Path(self._place))

  def get(self, values: Mapping[str, object]) -> Verdict | None:
    """Returns the verdict about an experiment with these values; None if there is none."""
    found = self.read(values)
    with contextlib.suppress(TypeError, KeyError):
      return None if found is None else Verdict(**{**found, 'mfu': tuple(found['mfu'])})
    return None

  def read(self, question: Mapping[str, object]) -> JsonObject | None:
    """Returns the answer to a question; None if there is none."""
    path = self._path(question)
    try:
      if self._answers:
        content = content_of(path, kept=False)
        return parse_line(bytes(content.read(0, content.size)), path)
    except (OSError, UserError) as e:
      self._answers = not isinstance(e, UnreadableError)
    return None

  def write(self, question: Mapping[str, object], answer: Mapping[str, object]) -> None:
    """Keeps the answer to a question, or a verdict; if it cannot be written, it is not kept."""
    try:
      if self._answers:
        write_output(self._path(question), (json.dumps(answer) + '\n').encode())
    except UserError:
      self._answers = False

  def _path(self, question: Mapping[str, object]) -> str:
    text = json.dumps([self._about, dict(question)], sort_keys=True, default=str)
    return f'{self._place}/{hashlib.sha256(text.encode()).hexdigest()[:32]}.json'


@functools.cache
def code(*packages: str) -> str:
  """Returns a sum of the code of packages; by default of those that decide compiled programs."""
  found = hashlib.sha256()
  package = pathlib.Path(__file__).parents[2]
  for name in packages or _COMPILED:
    for path in sorted((package / name).rglob('*.py')):
      found.update(path.read_bytes())
  return found.hexdigest()[:16]
