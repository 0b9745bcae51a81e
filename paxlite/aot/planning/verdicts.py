"""Verdicts about candidates, kept in files so that the same question is answered at once."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from paxlite.compilation.cache import cache_folder, remove_old
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import read_object
from paxlite.files.output import write_output

if TYPE_CHECKING:
  from paxlite.experiments.base import Experiment


class Verdict(NamedTuple):
  """The memory and the time of a candidate, from the compiler or from a run."""

  memory: float = 0.0  # the most bytes that a device needs at a time; 0 if that is not known
  seconds: float = 0.0  # of a step; 0 if the compiler refuses it or it was not run
  bound: str = ''  # what most of the step waits for, and what the time does not count
  error: str = ''  # why there is no verdict
  host: float = 0.0  # bytes of the memory of the host that each device needs

  def fits(self, memory: float) -> bool:
    """Returns whether the step runs with this memory on a device."""
    return not self.error and self.seconds > 0 and self.memory <= memory


def code_of(e: 'Experiment') -> JsonObject:
  """Returns what a verdict about an experiment depends on besides values: code, and its config."""
  # workers import this module before JAX may be imported
  from paxlite.compilation.versions import code_of_paxlite
  from paxlite.config.templates import config_text
  from paxlite.experiments.user_sources import sources

  task = e.task()
  user = {name: fingerprint for name, (fingerprint, _) in sources([task]).items()}
  return {'paxlite': code_of_paxlite(), 'user': user, 'config': config_text(task, 'task')}


class Store:
  """One file for each verdict, for 30 days; a file that cannot be read counts as missing.

  Args:
    about: What all verdicts depend on: versions, machine.
    folder: An existing folder or one to be made; by default in the cache folder of this user.
  """

  def __init__(self, about: Mapping[str, object], folder: pathlib.Path | None = None):
    self._about, self._folder = about, folder or cache_folder() / 'plans'
    with contextlib.suppress(OSError):
      remove_old(self._folder)

  def get(self, values: Mapping[str, object]) -> Verdict | None:
    """Returns the verdict about an experiment with these values; None if there is none."""
    with contextlib.suppress(UserError, TypeError):
      return Verdict(**read_object(self._path(values)))
    return None

  def write(self, values: Mapping[str, object], verdict: Verdict) -> None:
    """Keeps the verdict about an experiment; if it cannot be written, it is not kept."""
    with contextlib.suppress(UserError):
      write_output(str(self._path(values)), (json.dumps(verdict._asdict()) + '\n').encode())

  def _path(self, values: Mapping[str, object]) -> pathlib.Path:
    text = json.dumps([self._about, dict(values)], sort_keys=True, default=str)
    return self._folder / f'{hashlib.sha256(text.encode()).hexdigest()[:32]}.json'
