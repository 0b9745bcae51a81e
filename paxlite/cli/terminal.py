"""Prints lines for the user. A line that cannot be printed is dropped and does not stop the run."""

import contextlib
import io
import logging
import os
import sys

from paxlite.cli import live_line
from paxlite.core.foreign_text import printable


def say(text: str) -> None:
  """Prints a line on standard output, above the live line if there is one."""
  if not live_line.print_above(text):
    _print('stdout', text)


def warn(text: str) -> None:
  """Prints a line on standard error, which may have texts of others."""
  _print('stderr', printable(text))


class _LogLines(logging.Handler):
  """Prints log records on standard error, above the live line if there is one.

  The handlers of `logging` keep the stream that they began with, and so would write into the line.
  """

  def emit(self, record: logging.LogRecord) -> None:
    warn(self.format(record))


def print_logs() -> None:
  """Prints log records, unless the program has its own handlers."""
  logging.basicConfig(handlers=[_LogLines()])


def has_color() -> bool:
  """Whether what is printed may have colors: on a terminal, unless NO_COLOR is set."""
  return live_line.is_possible() and not os.environ.get('NO_COLOR')


def occupy_standard_files() -> None:
  """Opens /dev/null for each standard file that is closed (`>&-`).

  Otherwise the next file that is opened would get its number, and all that libraries print would go
  into that file.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      with contextlib.suppress(OSError):
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def settle() -> None:
  """Drops output that could not be printed; otherwise Python would replace the exit code by 120."""
  for name in ('stdout', 'stderr'):
    try:
      getattr(sys, name).flush()
    except (AttributeError, ValueError):  # the stream is missing or closed
      pass
    except OSError:
      _renew(name)


def _print(name: str, text: str) -> None:
  stream = getattr(sys, name)
  if stream is None:  # it was closed when the process started
    return
  try:
    print(text, file=stream, flush=True)
  except UnicodeEncodeError as e:
    _print(name, text.encode(e.encoding, 'replace').decode(e.encoding))
  except ValueError:  # it is closed
    pass
  except OSError:  # a disk is full, or the reader is gone; later lines may be printed
    _renew(name)


def _renew(name: str) -> None:
  """Replaces a stream by an empty one: the old one would retry to write what it still holds."""
  stream = getattr(sys, name)
  with contextlib.suppress(OSError, ValueError, AttributeError):
    file = io.FileIO(stream.fileno(), 'w', closefd=False)
    text = io.TextIOWrapper(file, stream.encoding, stream.errors, write_through=True)
    setattr(sys, name, text)
