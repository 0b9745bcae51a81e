"""Lines for whoever looks on. One that cannot be printed is dropped: that stops no run."""

import contextlib
import io
import os
import sys


def say(text: str) -> None:
  """Prints a line on standard output."""
  _print('stdout', text)


def warn(text: str) -> None:
  """Prints a line on standard error."""
  _print('stderr', text)


def occupy_standard_files() -> None:
  """Puts /dev/null where a standard file was closed (`>&-`).

  The next file that is opened would have its number, and whatever libraries print would go there.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      with contextlib.suppress(OSError):
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def settle() -> None:
  """Drops what others could not print: otherwise Python ends with 120 and not the exit code."""
  for name in ('stdout', 'stderr'):
    try:
      getattr(sys, name).flush()
    except (AttributeError, ValueError):  # there is none, or it is closed
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
  except OSError:  # a disk is full, or a reader or terminal gone; that may pass
    _renew(name)


def _renew(name: str) -> None:
  """Takes a stream that holds nothing: the old one would try again to write what it could not."""
  stream = getattr(sys, name)
  with contextlib.suppress(OSError, ValueError, AttributeError):
    file = io.FileIO(stream.fileno(), 'w', closefd=False)
    text = io.TextIOWrapper(file, stream.encoding, stream.errors, write_through=True)
    setattr(sys, name, text)
