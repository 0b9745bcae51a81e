"""Runs `paxlite train`, `paxlite eval` and `paxlite decode` by `paxlite.main`."""

import pathlib
import re
import sys
from collections.abc import Sequence

from paxlite import main as paxlite_main
from paxlite.cli.terminal import warn
from paxlite.core.errors import UserError
from paxlite.stores.addresses import is_address

_HELP = {
  'train': """paxlite train EXPERIMENT [--folder=FOLDER] [NAME=VALUE …]

Trains an experiment to its last step. If FOLDER holds a run of it that is not complete, training
continues from the last checkpoint. Ctrl-C saves and ends; the same command continues.

  EXPERIMENT          TinyGPT, or my_module.MyGPT; `paxlite list` lists those of paxlite
  --folder=FOLDER     checkpoints, metrics and logs (runs/EXPERIMENT)
  NAME=VALUE          sets an attribute of the experiment; `paxlite show EXPERIMENT` lists them
  --dry_run           print the configuration, its parameters and bytes, and stop
  --accept_changes    continue with other values, or other data, than those the run began with
  --start_over        begin again if none of the checkpoints is good
  --fiddler=FUNCTION  a function that edits the config
  --compiled_step=F   load a step that `paxlite compile --save=F` has compiled

Examples:
  paxlite train TinyGPT
  paxlite train TinyGPT --folder=runs/wide MODEL_DIMS=256 MAX_STEPS=100
  paxlite train GPT126M --dry_run

`python -m paxlite.main --help` lists all flags, with those for several processes.""",
  'eval': """paxlite eval RUN [--before] [NAME=VALUE …]

Evaluates the last good checkpoint of a run on its held-out data, with the settings of the run, and
on the zero-shot tasks of EVAL_TASKS.

  RUN                 the folder of the run; or an experiment that starts from published weights
  --folder=FOLDER     where metrics go, if RUN is an experiment (runs/EXPERIMENT)
  --before            evaluate first the weights that the run began with
  NAME=VALUE          changes an attribute

`paxlite zero-shot WEIGHTS --tasks=TASK.json` evaluates imported weights on a task.

Examples:
  paxlite eval runs/TinyGPT
  paxlite eval runs/TinyGPT EVAL_BATCH_SIZE=8""",
  'decode': """paxlite decode RUN [NAME=VALUE …]

Continues the prompts of an experiment (DECODE_FILES) with the last good checkpoint of its run.

  RUN                 the folder of the run
  NAME=VALUE          changes an attribute, such as MAX_DECODE_STEPS or TEMPERATURE

Examples:
  paxlite decode runs/TinyGPT""",
}
_OVERRIDE = re.compile(r'[A-Za-z][A-Za-z0-9_]*=')  # small letters get a hint


def main(argv: Sequence[str]) -> None:
  """Runs a mode of `paxlite.main`, which is argv[0], and ends the process with its exit code."""
  mode, *words = argv
  if {'-h', '--help', '-help'} & set(words):
    print(_HELP[mode])
    return
  try:
    given = flags(mode, words)
  except UserError as e:
    warn(f'error: {e}')
    sys.exit(2)
  paxlite_main.run(given)


def flags(mode: str, words: Sequence[str]) -> list[str]:
  """Returns the flags of `paxlite.main` for the words after `paxlite train`, eval or decode."""
  result = [f'--mode={mode}']
  names: list[str] = []
  takes_value = False
  for word in words:
    if takes_value or (word.startswith('-') and not _is_folder(word)):
      takes_value = not takes_value and paxlite_main.takes_next_word(word)
      result.append(word)
    elif _is_folder(word):
      _, equals, value = word.partition('=')
      result.append('--job_log_dir' + equals + value)
      takes_value = not equals
    elif _OVERRIDE.match(word):
      result.append(f'--fdl.{word}')
    else:
      names.append(word)
  return result + _named(mode, names, result)


def _is_folder(word: str) -> bool:
  return word.partition('=')[0] in ('--folder', '-folder')


def _named(mode: str, names: Sequence[str], given: Sequence[str]) -> list[str]:
  """Returns the flags for the words that are neither flags nor attributes."""
  is_given = lambda name: any(w.lstrip('-').partition('=')[0] == name for w in given)
  if any(w.startswith('-') and not paxlite_main.is_flag(w) for w in given):
    return []  # paxlite.main names the flag; the word after it is its value and no name
  if len(names) > 1:
    raise UserError(f'{names[1]!r} is one name too many: see paxlite {mode} --help')
  if not names:
    if is_given('fdl_config') or is_given('job_log_dir'):
      return []
    what = 'EXPERIMENT' if mode == 'train' else 'RUN'
    raise UserError(f'{what} is missing: see paxlite {mode} --help')
  (name,) = names
  if mode != 'train' and (pathlib.Path(name).is_dir() or '/' in name):
    if not (is_address(name) or pathlib.Path(name).expanduser().is_dir()):
      raise UserError(f'{name} is not a folder: name that of a run, as in paxlite {mode} runs/mine')
    return [f'--job_log_dir={name}']
  if is_given('job_log_dir') or is_given('dry_run'):
    return [f'--fdl_config={name}']
  return [f'--fdl_config={name}', f'--job_log_dir=runs/{name.rpartition(".")[2]}']
