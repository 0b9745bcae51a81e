"""paxlite finetune WEIGHTS [--method=sft|lora|documents] [--folder=FOLDER] [NAME=VALUE …]

Trains published weights further, as `paxlite train` does with an experiment: the same command
continues a run that was ended, and all flags of `paxlite train` are taken too.

  WEIGHTS             a folder that `paxlite import` has written, or a run of any experiment; or the
                      name of a model (`paxlite list`), with CHECKPOINT_RESTORE_PATH=FOLDER
  --method=sft        all weights, on prompts and answers in TRAIN_FILES (sft)
  --method=lora       low-rank factors beside the weights, on the same
  --method=documents  all weights, on texts in TRAIN_SOURCES
  --folder=FOLDER     checkpoints, metrics and logs (runs/WEIGHTS-METHOD)
  NAME=VALUE          sets an attribute of the experiment
  --dry_run           print the configuration, its parameters and bytes, and stop

The experiments are HuggingFaceSFT, HuggingFaceLoRA and HuggingFaceDocuments, and their attribute
MODEL is the name of the model: `paxlite plan HuggingFaceLoRA MODEL=LLaMA3_8B`.

Examples:
  paxlite finetune weights/smollm --method=lora TRAIN_FILES=chats.jsonl
  paxlite finetune weights/smollm 'ICI_MESH_SHAPE=[1,8,1]' TRAIN_FILES=chats.jsonl NUM_EPOCHS=3
  paxlite finetune LLaMA3_8B --method=lora --dry_run
"""

import pathlib
import re
import sys
from collections.abc import Sequence

from paxlite import main as paxlite_main
from paxlite.cli.terminal import warn
from paxlite.config.experiment_file import FINE_TUNING
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean

_HELP = {'-h', '--help', '-help'}
_OVERRIDE = re.compile(r'[A-Za-z][A-Za-z0-9_]*=')
_PATH = 'CHECKPOINT_RESTORE_PATH'


def main(argv: Sequence[str]) -> None:
  """Trains by `paxlite.main`, and ends the process with its exit code."""
  if _HELP & set(argv):
    print((__doc__ or '').rstrip())
    return
  try:
    given = flags(argv)
  except UserError as e:
    warn(f'error: {e}')
    sys.exit(2)
  paxlite_main.run(given)


def flags(words: Sequence[str]) -> list[str]:
  """Returns the flags of `paxlite.main` for the words after `paxlite finetune`."""
  given: list[str] = []
  named: list[str] = []
  own = {'method': 'sft', 'folder': ''}
  rest = iter(words)
  for word in rest:
    name, equals, value = word.lstrip('-').partition('=')
    if word.startswith('-') and name in own:
      own[name] = value if equals else next(rest, '')
    elif word.startswith('-'):
      given += [word, *([next(rest, '')] if paxlite_main.takes_next_word(word) else [])]
    elif _OVERRIDE.match(word):
      given.append(f'--fdl.{word}')
    else:
      named.append(word)
  method = own['method']
  if method not in FINE_TUNING:
    hint = did_you_mean(method, FINE_TUNING, cutoff=0.6)
    raise UserError(f'--method={method} must be sft, lora or documents. {hint}'.rstrip())
  flag_names = [flag.lstrip('-').partition('=')[0] for flag in given if flag.startswith('-')]
  if len(named) > 1:
    raise UserError(f'{named[1]!r} is one name too many: see paxlite finetune --help')
  if not named:
    raise UserError('WEIGHTS is missing: see paxlite finetune --help')
  (weights,) = named
  has_path = f'fdl.{_PATH}' in flag_names
  if '/' in weights or pathlib.Path(weights).expanduser().is_dir():
    if has_path:
      raise UserError(f'{weights} and {_PATH} both say which weights to train: leave one out')
    start = f'--fdl.{_PATH}=' + weights
  elif has_path or 'dry_run' in flag_names:
    start = '--fdl.MODEL=' + weights
  else:
    raise UserError(
      f'{weights} is not a folder. If it is the name of a model, its weights are missing: '
      f'{_PATH}=FOLDER, as paxlite import writes them'
    )
  folder = own['folder']
  if not folder and 'job_log_dir' not in flag_names:
    last = weights.rstrip('/').rpartition('/')[2] or 'weights'
    folder = f'runs/{last}-{method}'
  kept = [f'--job_log_dir={folder}'] if folder else []
  return ['--mode=train', f'--fdl_config={FINE_TUNING[method]}', start, *given, *kept]
