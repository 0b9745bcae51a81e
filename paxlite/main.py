"""python -m paxlite.main --fdl_config=EXPERIMENT --job_log_dir=FOLDER [--fdl.NAME=VALUE …]

Trains, evaluates, decodes or describes an experiment. EXPERIMENT is the name of its class: the bare
name for experiments of paxlite (`paxlite list` lists them), the dotted name for your own.
--fdl.NAME=VALUE, or NAME=VALUE, sets one of its attributes.

Examples:
  python -m paxlite.main --fdl_config=TinyGPT --job_log_dir=logs/tiny --fdl.NUM_LAYERS=3
  python -m paxlite.main --mode=eval --job_log_dir=logs/tiny
"""

import argparse
import contextlib
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from paxlite.checkpointing import save_errors
from paxlite.cli import command_line, user_code
from paxlite.cli.parser import HELP
from paxlite.cli.run_options import RunParser
from paxlite.cli.terminal import occupy_standard_files, print_logs, settle, warn
from paxlite.core.child_processes import obey_parent
from paxlite.core.errors import (
  EXIT_AGAIN,
  NO_SPACE,
  Interrupted,
  TrainingError,
  UserError,
  check_interpreter,
)
from paxlite.processes import cpu_memory, preemption
from paxlite.training import goodput

goodput.start_clock()

PARSER = RunParser(__doc__)


def main(argv: Sequence[str], parser: RunParser = PARSER) -> int:
  """Runs a program with the arguments that follow its name; returns the exit code.

  0 means success, 1 that training cannot continue, 2 that the input is wrong, and 75 that the run
  continues when it is started again. 130 means Ctrl-C at a time when there was nothing to save.
  """
  occupy_standard_files()
  obey_parent()
  print_logs()
  folder = ''
  try:
    check_interpreter()
    if HELP & set(argv):
      parser.print_help()
      return 0
    options = parsed(argv[1:], parser)
    folder = options.job_log_dir or ''
    # evaluating and decoding have nothing to save
    asked_to_leave = preemption.listening(saves=options.enable_checkpoint_saving, owner=True)
    with asked_to_leave if options.mode == 'train' else contextlib.nullcontext():
      from paxlite.programs import launch

      launch.launch(options)
    return 0
  except UserError as e:
    warn(f'error: {first_line(e)}')
    return 2
  except TrainingError as e:
    warn(f'stopped: {e}')
    return 1
  except OSError as e:
    if command_line.is_of_stdout(e):
      raise
    if not e.filename and e.errno not in NO_SPACE:
      return _unexpected(e, folder)
    warn(f'stopped: {e.filename or "a file of the run"}: {e.strerror or e}')
    return 1
  except Interrupted as e:
    jax = sys.modules.get('jax')
    alone = jax is None or jax.process_count() == 1
    how = (
      f'. Continue with:\n{command_line.this_command()}'
      if alone
      else '; start it again to continue'
    )
    warn(f'interrupted: {e}{how}')
    return EXIT_AGAIN
  except KeyboardInterrupt:  # there was nothing to save
    warn('interrupted')
    return 128 + signal.SIGINT
  except Exception as e:
    return _unexpected(e, folder)
  finally:
    settle()


def _unexpected(error: Exception, folder: str) -> int:
  """Reports an error of the user's own code, or of paxlite; returns the exit code."""
  place = None if not folder or '://' in folder else pathlib.Path(folder)
  has_files = '://' in folder or (place is not None and (place / 'versions.json').exists())
  files = f', and experiment.txt and versions.json in {folder}' if has_files else ''
  user_code.print_error(error, f'{command_line.DEFECT}{files}.', place)
  return 1


def first_line(error: UserError) -> str:
  """Returns the message without the lines in which Fiddle says what it was building."""
  return str(error).splitlines()[0]


def parsed(argv: Sequence[str], parser: RunParser = PARSER) -> argparse.Namespace:
  """Returns the options of a run; prints warnings about those that do nothing here.

  Raises UserError if they do not name a run.
  """
  options = parser.parsed(argv)
  folder = options.job_log_dir
  if options.fdl_config is None and (options.mode == 'train' or not folder):
    hint = 'List them: paxlite list'
    if folder:
      from paxlite.programs.launch import run_in

      run = run_in(folder)
      hint = f'The run there is of {run["experiment"]}' if run else hint
    raise UserError(f'--fdl_config=EXPERIMENT is missing. {hint}')
  if not folder and not options.dry_run:
    raise UserError('--job_log_dir=FOLDER is missing')
  for warning in options.warnings:
    warn(warning)
  for module in options.imports:
    command_line.import_asked(module)
  return options


def run(arguments: Sequence[str], parser: RunParser = PARSER) -> NoReturn:
  """Runs the program with these arguments, and ends the process with its exit code."""
  if not HELP & set(arguments):
    cpu_memory.restart_with_them()
  # the exit code if the reader of the output is gone (`--help | head`), which does not end training
  exit_code = 0 if {'--dry_run', *HELP} & set(arguments) else 1
  with command_line.printing(output_matters=False):
    exit_code = main([sys.argv[0], *arguments], parser)
  save_errors.end(exit_code)


if __name__ == '__main__':
  run(sys.argv[1:])
