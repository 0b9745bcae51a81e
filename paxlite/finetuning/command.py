"""paxlite finetune WEIGHTS [--method=METHOD] [--folder=FOLDER] [NAME=VALUE …]

Fine-tunes published weights; the same command continues the run. WEIGHTS is a folder from `paxlite
import`, a run, a Hugging Face Hub model (org/name), or a model of `paxlite list` with
CHECKPOINT_RESTORE_PATH.

  sft        trains all weights on prompts and answers in TRAIN_FILES
  lora       trains low-rank factors on the same; qlora: with 4-bit weights
  documents  trains all weights on documents in TRAIN_SOURCES
  distill    trains all weights on prompts, answers and a TEACHER's distribution
  opd        trains all weights on the model's own answers and a TEACHER's distribution
  dpo        trains all weights on pairs of a chosen and a rejected answer; also ipo, orpo, simpo
  kto        trains all weights on answers labelled good or bad
  reward     trains a reward model on the pairs of dpo
  grpo       trains all weights on rewards of the model's own answers

Example:
  paxlite finetune weights/smollm --method=lora TRAIN_FILES=chats.jsonl
"""

import argparse
import functools
import pathlib
from collections.abc import Collection

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser
from paxlite.config.experiment_file import FINE_TUNING, VALUES_OF_METHODS
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean

_PATH = 'CHECKPOINT_RESTORE_PATH'
_WORD = 'WEIGHTS', 'folder of weights, run, or model name'


def _method(text: str) -> str:
  if text not in FINE_TUNING:
    hint = did_you_mean(text, FINE_TUNING, cutoff=0.6)
    *names, last = FINE_TUNING
    raise UserError(f'{text} must be {", ".join(names)} or {last}. {hint}'.rstrip())
  return text


class _FinetuneParser(RunParser):
  def __init__(self) -> None:
    super().__init__(__doc__, 'train', _WORD, folder='runs/WEIGHTS-METHOD')
    self.option('--method', 'method from the list above (sft)', _method, default='sft')

  def complete(self, options: argparse.Namespace, stated: Collection[str]) -> None:
    weights, method = options.name, options.method
    if weights is None:
      raise UserError(f'WEIGHTS is missing: see {self.prog} --help')
    if '/' in weights or pathlib.Path(weights).expanduser().is_dir():
      if _PATH in stated:
        raise UserError(f'{weights} and {_PATH} both name weights: leave one out')
      named = _PATH
    elif 'MODEL' in stated:
      raise UserError(f'{weights} and MODEL both name a model: leave one out')
    elif _PATH in stated or options.dry_run:
      named = 'MODEL'
    else:
      raise UserError(
        f'{weights} is not a folder. If it is a model, set its weights: {_PATH}=FOLDER, as '
        'paxlite import writes them'
      )
    options.fdl_config = FINE_TUNING[method]
    options.attributes = {**VALUES_OF_METHODS.get(method, {}), named: weights}
    if options.job_log_dir is None and not options.dry_run:
      last = weights.rstrip('/').rpartition('/')[2] or 'weights'
      options.job_log_dir = f'runs/{last}-{method}'


PARSER = _FinetuneParser()
main = functools.partial(paxlite_main.run, parser=PARSER)
