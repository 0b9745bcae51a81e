"""python -m paxlite.main --fdl_config=EXPERIMENT --job_log_dir=FOLDER [--fdl.NAME=VALUE …]

Trains, evaluates, decodes or describes an experiment. EXPERIMENT is the name of its class: the bare
name for experiments of paxlite (`paxlite list` lists them), the dotted name
for your own. --fdl.NAME=VALUE overrides one of its attributes.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags

from paxlite.checkpointing import save_errors
from paxlite.cli import command_line, own_code
from paxlite.cli.terminal import occupy_standard_files, print_logs, settle, warn
from paxlite.compilation import cache
from paxlite.core.errors import (
  EXIT_AGAIN,
  NO_SPACE,
  AbsentError,
  Interrupted,
  TrainingError,
  UserError,
  check_interpreter,
)
from paxlite.core.json_text import JsonObject
from paxlite.core.near_names import did_you_mean
from paxlite.other_systems import other_names
from paxlite.processes import cpu_memory, preemption
from paxlite.stores import paths
from paxlite.training import goodput

goodput.start_clock()

_FLAGS = flags.FlagValues()
_PATHS = {
  'job_log_dir': paths.stored,
  'local_dir': paths.local,
  'compiled_step': paths.local,
  'tfds_data_dir': paths.expanded,  # TFDS reads from object stores
}
_HELP = {'--help', '-help', '-h', '--helpfull', '--helpshort'}

_CONFIG = flags.DEFINE_string(
  'fdl_config',
  None,
  'The experiment: Synthetic126M, or my.module.MyExperiment.',
  flag_values=_FLAGS,
)
flags.DEFINE_alias('exp', 'fdl_config', flag_values=_FLAGS)  # both are Pax's
_FIDDLERS = flags.DEFINE_multi_string(
  'fiddler', [], 'A function that edits the fdl.Config of the experiment.', flag_values=_FLAGS
)
_FOLDER = flags.DEFINE_string(
  'job_log_dir', None, 'Folder for checkpoints, metrics and summaries.', flag_values=_FLAGS
)
_LOCAL_DIR = flags.DEFINE_string(
  'local_dir',
  None,
  'Where a run in gs:// or s3:// keeps its folder on this machine (~/.cache/paxlite/runs).',
  flag_values=_FLAGS,
)
_MODE = flags.DEFINE_enum(
  'mode',
  'train',
  ['train', 'eval', 'decode', 'decode_once'],
  'What to do with the experiment; decode_once, as in Pax, is decode.',
  flag_values=_FLAGS,
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Print the configuration and what it needs, and stop.', flag_values=_FLAGS
)
_SAVE = flags.DEFINE_bool(
  'enable_checkpoint_saving', True, 'Whether training writes checkpoints.', flag_values=_FLAGS
)
_BEFORE = flags.DEFINE_bool(
  'before',
  False,
  'For --mode=eval: evaluate also the weights that the run began with.',
  flag_values=_FLAGS,
)
_ACCEPT = flags.DEFINE_bool(
  'accept_changes',
  False,
  'Continue a folder of a different experiment, or with other data.',
  flag_values=_FLAGS,
)
_START_OVER = flags.DEFINE_bool(
  'start_over',
  False,
  'Begin again as a new run does where the folder holds checkpoints and none of them is good.',
  flag_values=_FLAGS,
)
_CHECK_MEMORY = flags.DEFINE_bool(
  'check_memory',
  True,
  'Refuse a run that needs more memory than is left, before it takes it.',
  flag_values=_FLAGS,
)
_COMPILED_STEP = flags.DEFINE_string(
  'compiled_step',
  None,
  'A train step that paxlite compile --save has written, to load.',
  flag_values=_FLAGS,
)
flags.DEFINE_bool(  # Pax's scripts pass it
  'alsologtostderr', True, 'Does nothing: logs go to stderr anyway.', flag_values=_FLAGS
)
_TFDS_DATA_DIR = flags.DEFINE_string(
  'tfds_data_dir', None, 'Where TFDS datasets are; TFDS_DATA_DIR is the same.', flag_values=_FLAGS
)
_MULTIPROCESS = flags.DEFINE_bool(
  'multiprocess_gpu',
  False,
  'Whether this is one process of several; on Slurm that is known without it.',
  flag_values=_FLAGS,
)
_SERVER_ADDR = flags.DEFINE_string(
  'server_addr', None, 'HOST:PORT of process 0, for the others to find it.', flag_values=_FLAGS
)
_NUM_HOSTS = flags.DEFINE_integer('num_hosts', None, 'How many processes.', flag_values=_FLAGS)
_HOST_IDX = flags.DEFINE_integer('host_idx', None, 'Which one this is, from 0.', flag_values=_FLAGS)
_PROFILER_PORT = flags.DEFINE_integer(
  'jax_profiler_port',
  None,
  lower_bound=1,
  upper_bound=65535,
  help='Port of the JAX profiler server; off by default.',
  flag_values=_FLAGS,
)


def main(argv: Sequence[str]) -> int:
  """Returns the exit code.

  0 means success, 1 that training cannot continue, 2 that the input is wrong, and 75 that the run
  continues when it is started again. 130 means Ctrl-C at a time when there was nothing to save.
  """
  occupy_standard_files()
  print_logs()
  try:
    check_interpreter()
    if _HELP & set(argv):
      print(f'{__doc__}\nFlags:\n{_FLAGS.get_help()}\n  --fdl.NAME=VALUE: One of its attributes.')
      return 0
    overrides = _parse(argv)
    # evaluating and decoding have nothing to save
    asked_to_leave = preemption.listening(saves=bool(_SAVE.value), owner=True)
    with asked_to_leave if _MODE.value == 'train' else contextlib.nullcontext():
      _run(overrides)
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
      return _unexpected(e)
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
    return _unexpected(e)
  finally:
    settle()


def _unexpected(error: Exception) -> int:
  """Reports an error of the user's own code, or of paxlite; returns the exit code."""
  folder = _FOLDER.value or ''
  place = None if not folder or '://' in folder else pathlib.Path(folder).expanduser()
  has_files = '://' in folder or (place is not None and (place / 'versions.json').exists())
  files = f', and experiment.txt and versions.json in {folder}' if has_files else ''
  own_code.print_error(error, f'{command_line.DEFECT}{files}.', place)
  return 1


def first_line(error: UserError) -> str:
  """Returns the message without the lines in which Fiddle says what it was building."""
  return str(error).splitlines()[0]


def _parse(argv: Sequence[str]) -> dict[str, str]:
  """Sets the flags; returns the text of every --fdl.NAME=text."""
  overrides: dict[str, str] = {}
  plain = [argv[0]]
  remarks = []
  for argument in argv[1:]:
    if argument.lstrip('-').startswith('fdl.') and argument.startswith('-'):
      name, equals, text = argument.lstrip('-').removeprefix('fdl.').partition('=')
      if not equals:
        raise UserError(f'{argument} has no value: write --fdl.{name}=VALUE')
      overrides[name] = text
    elif (remark := other_names.remark_on(argument)) is not None:
      remarks.append(remark)
    else:
      plain.append(argument)
  try:
    _FLAGS.unparse_flags()
    rest = _FLAGS(plain)[1:]
  except flags.UnrecognizedFlagError as e:
    meant = did_you_mean(e.flagname, _FLAGS, prefix='--') or 'See python -m paxlite.main --help'
    hint = other_names.flag_hint(e.flagname) or meant
    raise UserError(f'Unknown command line flag {e.flagname!r}. {hint}') from None
  except (flags.Error, ValueError) as e:  # ValueError comes from --flagfile and --nodry_run=x
    modes = [a.partition('=')[2] for a in plain if a.lstrip('-').startswith('mode=')]
    hint = ' '.join(filter(None, map(other_names.mode_hint, modes)))
    raise UserError(f'{e}. {hint or "See python -m paxlite.main --help"}') from None
  if rest:
    hint = other_names.arguments_hint(rest)
    raise UserError(f'unexpected argument {rest[0]!r}: flags are written --name=value. {hint}')
  for name, read in _PATHS.items():
    _expand(name, read)
  if _CONFIG.value is None and (_MODE.value == 'train' or not _FOLDER.value):
    run = _run_before(_FOLDER.value) if _FOLDER.value else None
    hint = f'The run there is of {run["experiment"]}' if run else 'List them: paxlite list'
    raise UserError(f'--fdl_config=EXPERIMENT is missing. {hint}')
  if not _FOLDER.value and not _DRY_RUN.value:
    raise UserError('--job_log_dir=FOLDER is missing')
  for remark in filter(None, remarks):
    warn(remark)
  return overrides


def _expand(name: str, read: Callable[[str], str]) -> None:
  """Turns the value of the flag `name` into a path, if it has a value."""
  if _FLAGS[name].value is not None:
    try:
      _FLAGS[name].value = read(str(_FLAGS[name].value))
    except UserError as e:
      raise UserError(f'--{name}={e}') from None


def _run(overrides: dict[str, str]) -> None:
  from paxlite.programs.weights_model import build_experiment

  if _TFDS_DATA_DIR.value is not None:
    try:
      os.environ['TFDS_DATA_DIR'] = _TFDS_DATA_DIR.value
    except ValueError as e:
      raise UserError(f'--tfds_data_dir={_TFDS_DATA_DIR.value!r} is not a folder: {e}') from None
  run_before = None if _MODE.value == 'train' or not _FOLDER.value else _run_before(_FOLDER.value)
  name = _CONFIG.value or _experiment_name(run_before)
  experiment = build_experiment(name, _FIDDLERS.value, overrides, run_before)
  if _COMPILED_STEP.value is not None and (_MODE.value != 'train' or _DRY_RUN.value):
    raise UserError('--compiled_step is for training: leave it out')
  if _BEFORE.value and _MODE.value != 'eval':
    raise UserError('--before is for --mode=eval: leave it out')
  from paxlite.experiments.description import dry_run
  from paxlite.parallel import devices
  from paxlite.processes import join, place
  from paxlite.programs.agreement import statement
  from paxlite.programs.decoding import decode
  from paxlite.programs.evaluation import evaluate
  from paxlite.programs.run import Run
  from paxlite.programs.run_folder import located_run
  from paxlite.programs.training import train

  if _DRY_RUN.value:
    devices.present()
    print(dry_run(experiment))
    return
  folder, address = located_run(str(_FOLDER.value), _LOCAL_DIR.value)
  run = Run(
    experiment,
    folder,
    address=address,
    save=_SAVE.value,
    accept_changes=_ACCEPT.value,
    start_over=_START_OVER.value,
    check_memory=bool(_CHECK_MEMORY.value),
    compiled_step=None if _COMPILED_STEP.value is None else pathlib.Path(_COMPILED_STEP.value),
  )
  found = place.find(_SERVER_ADDR.value, _NUM_HOSTS.value, _HOST_IDX.value, _MULTIPROCESS.value)
  peers = join.join(found, lambda: statement(run, _MODE.value))
  if peers.count == 1:
    cache.enable()
    devices.present()
  if _MODE.value != 'train':  # replaces JAX's handler, because there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
  if _PROFILER_PORT.value:
    import jax

    jax.profiler.start_server(_PROFILER_PORT.value)
  scored = functools.partial(evaluate, before=bool(_BEFORE.value))
  modes: dict[str, Callable[[Run], object]] = {
    'train': train,
    'eval': scored,
    'decode': decode,
    'decode_once': decode,
  }
  with peers, join.leaving_together():
    preemption.check()
    modes[_MODE.value](dataclasses.replace(run, peers=peers))


def _run_before(folder: str) -> JsonObject | None:
  """Returns the experiment of the run in a folder and its values, or None if there is no run."""
  from paxlite.checkpointing.stored_source import folder_of
  from paxlite.experiments.identity import run_values

  try:
    return run_values(folder_of(folder))
  except AbsentError:
    return None


def _experiment_name(run: JsonObject | None) -> str:
  """Returns the name of a run's experiment, which is used if --fdl_config is missing.

  The name must be a known experiment: a name in a file must not cause the import of a module.
  """
  from paxlite.experiments.registry import find_known

  if run is None:
    raise UserError(
      f'--fdl_config=EXPERIMENT is missing, and --job_log_dir={_FOLDER.value} holds no '
      'experiment.json that names one'
    )
  name = run['experiment']
  find_known(name, way_out=f'--fdl_config={name}')
  return name


def is_flag(argument: str) -> bool:
  """Returns whether an argument that begins with a hyphen is a flag of this program."""
  name = argument.lstrip('-').partition('=')[0]
  return (
    name in _FLAGS
    or name.removeprefix('no') in _FLAGS
    or name.startswith('fdl.')
    or other_names.remark_on(argument) is not None
  )


def takes_next_word(argument: str) -> bool:
  """Returns whether the word after this flag is its value, as after `--mode`."""
  name, equals, _ = argument.lstrip('-').partition('=')
  return not equals and name in _FLAGS and not _FLAGS[name].boolean


def run(arguments: Sequence[str]) -> NoReturn:
  """Runs the program with these flags, and ends the process with its exit code."""
  cpu_memory.restart_with_them()
  # the exit code if the reader of the output is gone (`--help | head`), which does not end training
  exit_code = 0 if {'--dry_run', *_HELP} & set(arguments) else 1
  with command_line.printing(output_matters=False):
    exit_code = main([sys.argv[0], *arguments])
  save_errors.end(exit_code)


if __name__ == '__main__':
  run(sys.argv[1:])
