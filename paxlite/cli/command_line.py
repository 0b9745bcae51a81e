"""Shared by all commands: printing, signals, exit codes, and a progress bar."""

import codecs
import contextlib
import io
import os
import select
import shlex
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from paxlite import extensions
from paxlite.cli import terminal, user_code
from paxlite.cli.user_modules import import_named
from paxlite.core.child_processes import obey_parent
from paxlite.core.errors import NO_SPACE, UserError, check_interpreter

_SPELLINGS = str.maketrans(
  {'×': 'x', '…': '...', '→': '->', '−': '-', '–': '-', '≤': '<=', '≥': '>=', '·': '*', '─': '-'}
)
_LINE_SECONDS = 5.0  # between two lines on work that takes long, where there is no terminal
_END_SECONDS = 10.0  # the time after a signal in which unfinished files are removed


def this_command() -> str:
  """Returns the command that started this process, so that it can be pasted into a shell."""
  is_script = os.path.basename(sys.argv[0]) in ('paxlite', '__main__.py')
  program = 'paxlite' if is_script else 'python -m paxlite.main'
  return f'{program} {shlex.join(sys.argv[1:])}'


# what is said after the traceback of an unexpected error; what else to add may follow
DEFECT = (
  'This error is a defect of paxlite. To report it, add the lines above, what `paxlite doctor` '
  'prints'
)


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Calls `main` with the command line.

  The exit code is 0, 1 where a disk is full or after an unexpected error, 2 after a UserError, and
  130 after Ctrl-C.

  The modules of --import=MODULE are imported first. Checkpoints name experiments, and no module is
  imported because a file names it.
  """
  _end_by_signals()
  obey_parent()
  terminal.print_logs()
  with printing():
    try:
      check_interpreter()
      main(_import_modules(sys.argv[1:]))
    except UserError as e:
      terminal.warn(f'error: {str(e).splitlines()[0]}')
      sys.exit(2)
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      sys.exit(128 + signal.SIGINT)
    except Exception as e:
      if isinstance(e, OSError) and is_of_stdout(e):
        raise
      if isinstance(e, OSError) and e.errno in NO_SPACE:
        print(f'error: {e.filename or "a file"} cannot be written: {e.strerror}', file=sys.stderr)
      else:
        user_code.print_error(e, f'{DEFECT}, and the command.')
      sys.exit(1)


def _end_by_signals() -> None:
  """Lets SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt, to remove unfinished files.

  A library that calls Python back may swallow these exceptions, or not return to Python for long. A
  thread therefore receives the signal too, and ends the process _END_SECONDS later.
  """
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def listen() -> None:
    while number := os.read(reader, 1)[0]:
      if number in (signal.SIGTERM, signal.SIGINT):
        time.sleep(_END_SECONDS)
        print('interrupted; unfinished output stays where it is', file=sys.stderr)
        os._exit(128 + number)

  threading.Thread(target=listen, name='signals', daemon=True).start()


@contextlib.contextmanager
def printing(output_matters: bool = True) -> Iterator[None]:
  """A context that prints to any terminal, and to readers that end early (`… | head`).

  Characters that the terminal's encoding lacks are printed in ASCII.

  Args:
    output_matters: Whether output that cannot be written makes the exit code 1.
  """
  codecs.register_error('paxlite.spelled', _spelled)
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors='paxlite.spelled')
  problem = ''
  try:
    yield
  except OSError as e:
    if not is_of_stdout(e):
      raise
    if not isinstance(e, BrokenPipeError):
      problem = e.strerror or str(e)
  finally:
    problem = _flush() or problem
    if problem:
      print(f'error: the output is incomplete: {problem}', file=sys.stderr)
  if problem and output_matters:
    sys.exit(1)


def is_of_stdout(error: OSError) -> bool:
  """Whether an error probably comes from printing: such errors name no file."""
  if error.filename or sys.stdout is None or sys.stdout.closed:
    return False
  try:
    descriptor = sys.stdout.fileno()
    if isinstance(error, BrokenPipeError):  # the kernel knows whether the pipe has a reader
      poll = select.poll()
      poll.register(descriptor, 0)
      return bool(poll.poll(0))
    kind = os.fstat(descriptor).st_mode  # terminals and pipes are never full
    return error.errno in NO_SPACE and (
      stat.S_ISREG(kind) or (stat.S_ISCHR(kind) and not os.isatty(descriptor))
    )
  except (OSError, ValueError):
    return False


def _flush() -> str:
  """Flushes standard output; returns the error, or '' on success and where the reader is gone."""
  if sys.stdout is None or sys.stdout.closed:
    return ''
  try:
    sys.stdout.flush()
  except OSError as e:
    # otherwise Python reports the unflushed output again when it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return '' if isinstance(e, BrokenPipeError) else e.strerror or str(e)
  return ''


def _spelled(error: UnicodeError) -> tuple[str, int]:
  """An error handler of codecs: 'x' for '×', and '\\xe9' for a character without a likeness."""
  assert isinstance(error, UnicodeEncodeError)
  text = error.object[error.start : error.end].translate(_SPELLINGS)
  return text.encode('ascii', 'backslashreplace').decode(), error.end


def _import_modules(argv: Sequence[str]) -> list[str]:
  """Imports the modules of --import=MODULE; returns the other arguments."""
  for argument in argv:
    if argument.startswith('--import='):
      import_asked(argument.removeprefix('--import='))
  return [a for a in argv if not a.startswith('--import=')]


def import_asked(name: str) -> None:
  """Imports the module of --import=MODULE; raises UserError if it does not exist."""
  try:
    import_named(name)
  except ImportError as e:
    if (e.name or '').startswith('paxlite.'):  # that of a leaf
      raise UserError(f'--import={name} needs {e.name}, which is not installed') from None
    if user_code.frame_of(e) is not None:  # the module is there, and does not import
      raise
    raise UserError(f'--import={name}: {e}') from None


def translate(command: str, argv: Sequence[str]) -> list[str]:
  """Replaces the flags of other converters; prints warnings about those that are left out."""
  kept, warnings = extensions.hint('command line', command, argv) or (argv, [])
  for warning in warnings:
    print(warning, file=sys.stderr)
  return [*kept]


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
  """A context that shows how far work is; yields a function (done, total) that moves it.

  On a terminal there is a progress bar, and elsewhere a line on standard error every few seconds.
  """
  from rich.console import Console
  from rich.progress import Progress

  console = Console(stderr=True)
  if not console.is_terminal:
    yield _progress_lines(what)
    return
  with Progress(console=console) as bar:
    task = bar.add_task(what, total=None)
    yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines(what: str) -> Callable[[int, int], None]:
  """Returns a function (done, total) that prints a line if the last one is some seconds old."""
  last = time.monotonic()

  def report(done: int, total: int) -> None:
    nonlocal last
    if time.monotonic() - last >= _LINE_SECONDS and done < total:
      last = time.monotonic()
      terminal.warn(f'{what} … {done / total:.0%}')

  return report
