"""The errors that paxlite raises deliberately; `paxlite.main` prints each on one line."""

import contextlib
import errno
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator

_WORK = 'paxlite_work'  # an attribute of exceptions
_NEEDED = 'jax', 'flax', 'optax', 'orbax', 'fiddle'  # without them nothing starts


class UserError(ValueError):
  """Wrong input. The message says on one line what is wrong, where, and how to fix it.

  Commands exit with 2 and print no traceback. cli/user_code.py reports exceptions from the user's
  own code; any other exception is a defect in paxlite and keeps its traceback.
  """

  def __init__(self, message: str):
    # names in files, and messages of packages, may have line breaks
    super().__init__(' '.join(line.strip() for line in message.splitlines()))


class TrainingError(RuntimeError):
  """Training cannot continue; the message says since when and why. Commands exit with 1."""


class WrongBitsError(TrainingError):
  """A repeated step gave other bits: the state may be wrong and must not be saved."""


class Interrupted(RuntimeError):
  """The run was told to stop; the same call continues it. Commands exit with EXIT_AGAIN."""


NO_SPACE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # a disk, a quota, or RLIMIT_FSIZE is used up
EXIT_AGAIN = 75  # sysexits.h's EX_TEMPFAIL: launch scripts start the run again


class UnreadableError(UserError):
  """A file cannot be read now; its contents may still be good."""


class AbsentError(UserError):
  """An address in an object store does not exist."""


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """Adds the file name to OSErrors from the block; open() does so itself, read() does not."""
  try:
    yield
  except OSError as e:
    raise OSError(e.errno, e.strerror or str(e), e.filename or os.fspath(path)) from None


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
  """Puts `place` (a file, line or flag) before the message of a UserError from the block."""
  try:
    yield
  except UserError as e:
    raise UserError(f'{place}: {e}') from None


def check_interpreter() -> None:
  """Checks that this Python can run paxlite.

  Raises UserError if it drops docstrings, which Fiddle needs, or lacks a package, as a Python
  outside the environment does.
  """
  if sys.flags.optimize > 1:
    raise UserError(
      'Python was started with -OO (or PYTHONOPTIMIZE=2), which drops docstrings, and Fiddle needs '
      'them: start it without, or with -O'
    )
  if missing := [package for package in _NEEDED if importlib.util.find_spec(package) is None]:
    raise UserError(
      f'{sys.executable} lacks {", ".join(missing)}: start the Python of the environment in which '
      'paxlite was installed, or install paxlite there'
    )


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
  """Notes in exceptions from the block what was being done, for `work_of`.

  Args:
    what: The work, as 'Compiling the train step'.
  """
  try:
    yield
  except Exception as e:
    if not work_of(e):  # the innermost work says most
      with contextlib.suppress(AttributeError, TypeError):
        setattr(e, _WORK, what)
    raise


def work_of(error: BaseException) -> str:
  """Returns what was being done when an exception was raised; '' if unknown."""
  return getattr(error, _WORK, '')


def line_of(error: Exception) -> str:
  """Returns the first line of an exception's message, at most 200 characters."""
  return (str(error).strip() or repr(error)).splitlines()[0][:200]


def compiled(pattern: str, place: str) -> re.Pattern[str]:
  """Compiles a user's regular expression; raises UserError if it is invalid."""
  try:
    return re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as e:
    raise UserError(f'{place}: {pattern!r} is not a regular expression: {e}') from None


def listed(problems: Iterable[str], shown: int = 8) -> str:
  """Lists problems, sorted, on one line: the first `shown`, and how many more there are."""
  ordered = sorted(problems)
  more = f'; and {len(ordered) - shown} more' if len(ordered) > shown else ''
  return '; '.join(ordered[:shown]) + more
