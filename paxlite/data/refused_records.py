"""Collects the records that a reader refuses, so that one reading of a file names all of them."""

import heapq
import logging
from collections.abc import Callable
from typing import TypeVar

from paxlite.core.errors import UserError

log = logging.getLogger('paxlite')

_T = TypeVar('_T')

_MOST_KEPT = 1000  # messages
_MOST_LOGGED = 20
MOST_NAMED = 3


class RefusedRecords:
  """The faults found in the records of a source.

  Attributes:
    messages: What is wrong with the first thousand, each with its place.
    count: The number of refused records.
    num_read: The number of all records.
  """

  def __init__(self) -> None:
    self.messages: list[str] = []
    self.count = self.num_read = 0

  @property
  def is_all(self) -> bool:
    """Whether there are records, and all of them are refused."""
    return 0 < self.count == self.num_read

  def attempt(self, read: Callable[..., _T], *args: object) -> _T | None:
    """Returns read(*args), or None if it raises a UserError that is about this record alone."""
    self.num_read += 1
    try:
      return read(*args)
    except RecordlessError:
      raise
    except UserError as e:
      self.count += 1
      if self.count <= _MOST_KEPT:
        self.messages.append(str(e))
      return None

  def add(self, later: 'RefusedRecords') -> None:
    """Adds what is wrong with later records."""
    self.num_read += later.num_read
    self.count += later.count
    self.messages = (self.messages + later.messages)[:_MOST_KEPT]

  def check(self, name: str, skip: bool, says: bool = True) -> None:
    """Raises UserError if records are refused and `skip` is false; else says how many are left out.

    Args:
      name: The name of the source, for messages.
      skip: Whether such records are left out.
      says: Whether to say that they are; another reader of the same records says so otherwise.
    """
    if not self.count:
      return
    if self.count == 1 and not skip:
      raise UserError(f'{self.messages[0]} (SKIP_UNREADABLE=True leaves such records out)')
    found = f'{name}: {self.count:,} of {self.num_read:,} records cannot be read'
    first = f'the first: {self.messages[0]}'
    if skip:
      if says:
        log.warning('%s, and are left out (SKIP_UNREADABLE); %s', found, first)
      return
    for message in self.messages[:_MOST_LOGGED]:
      log.warning('%s', message)
    raise UserError(f'{found}, {first}; SKIP_UNREADABLE=True leaves them out')


class RecordlessError(UserError):
  """An error that a reader of records meets at one of them, and that all of them have."""


class LongRecords:
  """Records of more tokens than a row holds.

  Attributes:
    count: Their number.
    first: Says which is the first; '' if there is none.
  """

  def __init__(self) -> None:
    self.count, self.first = 0, ''
    self._longest: list[tuple[int, str]] = []

  def add(self, length: int, place: str, message: str) -> None:
    """Counts a record of `length` tokens; `message` says what is too long."""
    self.count += 1
    self.first = self.first or message
    self._longest = heapq.nlargest(MOST_NAMED, [*self._longest, (length, place)])

  @property
  def longest(self) -> str:
    """The lengths of the longest and their places; '' if there is none."""
    return ', '.join(f'{length:,} tokens ({place})' for length, place in self._longest)
