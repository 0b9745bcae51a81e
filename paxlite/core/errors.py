"""The errors that paxlite raises on purpose. `paxlite.main` prints them as one line."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator


class UserError(ValueError):
  """Wrong input: the message says what is wrong, where, and the way out, on one line.

  Exit code 2, no traceback. What else escapes is a defect of paxlite and keeps its traceback.
  """

  def __init__(self, message: str):
    # names in files, and messages of packages, may have line breaks
    super().__init__(' '.join(line.strip() for line in message.splitlines()))


class TrainingError(RuntimeError):
  """Training cannot continue: the message says since when and why. Exit code 1."""


class Interrupted(RuntimeError):
  """A signal asked the run to end; started again, it continues. Exit code EXIT_AGAIN."""


EXIT_AGAIN = 75  # sysexits.h's EX_TEMPFAIL: launch scripts start the run again


class UnreadableError(UserError):
  """A file cannot be read now, which says nothing of what is in it."""


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """A context whose OSErrors name the file: those of opening do, those of reading do not."""
  try:
    yield
  except OSError as e:
    raise OSError(e.errno, e.strerror or str(e), os.fspath(path)) from None


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
  """Puts the place before the message of a UserError that comes out of the block."""
  try:
    yield
  except UserError as e:
    raise UserError(f'{place}: {e}') from None


def compiled(pattern: str, place: str) -> re.Pattern[str]:
  """A regular expression that somebody wrote; raises UserError where it is none."""
  try:
    return re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as e:
    raise UserError(f'{place}: {pattern!r} is not a regular expression: {e}') from None


def listed(problems: Iterable[str], shown: int = 8) -> str:
  """Problems, sorted, on one line: the first `shown`, and how many more there are."""
  ordered = sorted(problems)
  more = f'; and {len(ordered) - shown} more' if len(ordered) > shown else ''
  return '; '.join(ordered[:shown]) + more
