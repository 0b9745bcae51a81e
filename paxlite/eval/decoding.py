"""Runs --mode=decode, which continues prompts."""

import argparse
import os
import shlex

from paxlite.checkpointing.restore import Restore
from paxlite.checkpointing.source import find_source
from paxlite.cli.terminal import say
from paxlite.core.errors import UserError
from paxlite.eval.decoded_files import decode_file, read_prompts
from paxlite.experiments.language_model import LanguageModel
from paxlite.generation import inference
from paxlite.programs.agreement import compare_configs
from paxlite.programs.first_start import as_begun
from paxlite.programs.run import Run
from paxlite.programs.run_folder import (
  check_evaluated,
  check_present,
  holding,
  holds_weights,
  make_folder,
)
from paxlite.programs.weights_model import restore_of


def language_model(run: Run) -> LanguageModel:
  """Returns the experiment of a run; UserError if its model is not a language model."""
  if not isinstance(run.experiment, LanguageModel):
    raise UserError(f'{type(run.experiment).__name__} is not a language model')
  return run.experiment


def load(run: Run) -> tuple[inference.Inference, int | None]:
  """Returns the model of the last good checkpoint and its step, or of restored weights and None."""
  e = language_model(run)
  own = bool(run.checkpoints().steps())
  restore = Restore(str(run.folder)) if own else restore_of(e)
  if restore is None:
    raise UserError(
      f'{run.place} holds no checkpoint: train first, or name weights with CHECKPOINT_RESTORE_PATH'
    )
  source = find_source(restore.path)
  vocab = e.tokenizer_path or os.environ.get('VOCAB_PATH', '')
  loaded = inference.load(e, source, restore, vocab)
  return loaded, int(source.folder.name.rpartition('_')[2]) if own else None


def decode(run: Run, options: argparse.Namespace | None = None) -> None:
  """Continues the prompts of DECODE_FILES with the last good checkpoint or restored weights."""
  if holds_weights(run):
    raise UserError(
      f'{run.place} holds weights and no run: paxlite generate {shlex.quote(str(run.place))} '
      '"Once upon a time" continues a text with them'
    )
  with holding(run, deletes=False) as (held, _):
    _decode(as_begun(held))


def _decode(run: Run) -> None:
  e = language_model(run)
  if not e.DECODE_FILES:
    raise UserError('DECODE_FILES=/path/to/prompts.jsonl is missing')
  compare_configs(run)
  check_present(run)
  check_evaluated(run)
  loaded, step = load(run)
  prompts = read_prompts(e.DECODE_FILES, loaded)
  make_folder(run.folder)
  name = 'restored' if step is None else f'{step:08d}'
  output = run.folder / f'decoded_{name}.jsonl'
  count = decode_file(loaded, prompts, output)
  say(f'{output}: {len(prompts):,} prompts continued, {count:,} of them now')
