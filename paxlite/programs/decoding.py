"""Runs --mode=decode, which continues prompts."""

import shlex

from paxlite.cli.terminal import say
from paxlite.core.errors import UserError
from paxlite.programs.agreement import compare_configs
from paxlite.programs.first_start import as_begun
from paxlite.programs.run import Run, holding, load
from paxlite.programs.run_folder import make_folder


def decode(run: Run) -> None:
  """Continues the prompts of DECODE_FILES with the last good checkpoint or restored weights."""
  if run.holds_weights:
    raise UserError(
      f'{run.place} holds weights and no run: paxlite generate {shlex.quote(str(run.place))} '
      '"Once upon a time" continues a text with them'
    )
  with holding(run, deletes=False) as (held, _):
    _decode(as_begun(held))


def _decode(run: Run) -> None:
  from paxlite.eval import inference

  e = run.decoding
  if not e.DECODE_FILES:
    raise UserError('DECODE_FILES=/path/to/prompts.jsonl is missing')
  compare_configs(run)
  run.check_present()
  run.check_evaluated()
  loaded, step = load(run)
  prompts = inference.read_prompts(e.DECODE_FILES, loaded)
  make_folder(run.folder)
  name = 'restored' if step is None else f'{step:08d}'
  output = run.folder / f'decoded_{name}.jsonl'
  count = inference.decode_file(loaded, prompts, output)
  say(f'{output}: {len(prompts):,} prompts continued, {count:,} of them now')
