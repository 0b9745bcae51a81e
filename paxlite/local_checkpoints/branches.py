"""The branches of a run: which of its local states belong to its history, and which do not.

A run begins a new branch whenever it starts or rolls back. The states of a branch belong to the
history of the run only up to the step from which the next branch continues. The branches are in a
file of the run's folder, so states of another run never belong to it.
"""

import json
import pathlib
import secrets

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, parsed
from paxlite.core.run_files import write_file
from paxlite.files.json_files import read_object

_KEPT = 64  # branches; states of older ones are no longer used


class Branches:
  """The branches of a run in the order in which they began, as (id, first step)."""

  def __init__(self, found: list[tuple[str, int]] | None = None):
    self._found = found or []

  @classmethod
  def read(cls, folder: pathlib.Path) -> 'Branches':
    """Reads the branches of the run in a folder; none if the file is missing or damaged."""
    try:
      held: Json = read_object(folder / 'local_states.json')['branches']
      return cls([(str(branch), int(step)) for branch, step in held])
    except (UserError, KeyError, TypeError, ValueError):
      return cls()

  def write(self, folder: pathlib.Path) -> None:
    write_file(folder / 'local_states.json', self.encoded())

  @classmethod
  def decoded(cls, text: bytes) -> 'Branches':
    return cls([(branch, step) for branch, step in parsed(text)['branches']])

  def encoded(self) -> bytes:
    return json.dumps({'branches': self._found}).encode()

  def begun(self, step: int) -> 'Branches':
    """Returns the branches with a new one, which continues from `step`."""
    return Branches([*self._found[-_KEPT + 1 :], (secrets.token_hex(4), step)])

  @property
  def current(self) -> str:
    return self._found[-1][0]

  def hold(self, branch: str, step: int) -> bool:
    """Returns whether the state of a branch after `step` is in the history of the run."""
    left = [first for _, first in self._found[self._number(branch) + 1 :]]
    return self._number(branch) >= 0 and step <= min(left, default=step)

  def _number(self, branch: str) -> int:
    return next((i for i, (b, _) in enumerate(self._found) if b == branch), -1)
