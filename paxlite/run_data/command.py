"""Runs `paxlite data RUN`."""

import argparse
from collections.abc import Sequence

from paxlite.cli.terminal import has_color
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.run_data import comparison, counts, episodes, texts
from paxlite.run_data.planning import planned
from paxlite.run_data.run_data import RunData
from paxlite.run_data.spikes import Spike, spikes

_MOST_TOKENS = 200  # of a text of a step
_MOST_SPIKES = 5


def show(args: argparse.Namespace, runs: Sequence[str]) -> None:
  """Shows a step of a run, its counts, or a comparison of two runs.

  Args:
    args: The arguments of `paxlite data`.
    runs: Those of its files that are folders of runs.
  """
  _check(args, runs)
  if len(args.files) == 2:
    _compare(args)
    return
  run = RunData(args.files[0], args.vocab or '')
  if args.without is not None:
    for line in planned(run, args.without, args.output):
      print(line)
    return
  if args.counts:
    found = counts.counted(run)
    if args.json:
      texts.print_json(counts.as_json(found))
    else:
      print('\n'.join(counts.lines(found)))
    return
  found_spikes = spikes(run.losses) if args.spike else []
  step = args.step
  if args.spike:
    if not found_spikes:
      raise UserError(
        f'no loss of the {len(run.losses):,} recorded steps of {run.place} is far above the '
        'losses before it (SUMMARY_INTERVAL_STEPS sets how often losses are recorded): --step=N '
        'shows any step'
      )
    step = found_spikes[0].step
  if kept := run.episodes(step):
    _show_episodes(run, step, kept, args)
    return
  batch = run.batch(step)
  if args.json:
    found_json = texts.described(run, step, batch, args.row)
    if args.spike:
      found_json['spikes'] = [
        {'step': s.step, 'loss': s.loss, 'before': s.before} for s in found_spikes[:_MOST_SPIKES]
      ]
    texts.print_json(found_json)
    return
  for i, spike in enumerate(found_spikes[:_MOST_SPIKES]):
    print(f'{"Spikes" if not i else "":10}{_line(spike)}')
  most = None if args.row is not None else _MOST_TOKENS
  for line in texts.lines(run, step, batch, args.row, has_color(), most):
    print(line)


def _check(args: argparse.Namespace, runs: Sequence[str]) -> None:
  """Raises UserError if the arguments do not fit."""
  modes = {'step': args.step is not None, 'spike': args.spike, 'counts': args.counts}
  modes['without'] = args.without is not None
  asked = [f'--{name}' for name, is_asked in modes.items() if is_asked]
  if args.row is not None and args.step is None and not args.spike and len(asked) < 2:
    raise UserError('--row is for --step and --spike: leave it out')
  if not asked and len(runs) < 2:
    raise UserError('--json is for --step, --spike, --counts or two runs: leave it out')
  if len(asked) > 1:
    raise UserError(f'{" and ".join(asked)}: leave one of them out')
  if args.fdl_config or args.attributes or args.chat_template:
    raise UserError(
      "a run's values are in its folder: leave out --fdl_config, --chat_template and NAME=VALUE"
    )
  most = 1 if asked else 2
  if len(args.files) != most:
    what = f'{asked[0]} is for one run' if asked else 'two runs are compared'
    raise UserError(f'{what}, and {len(args.files)} names are given')


def _show_episodes(
  run: RunData, step: int, kept: list[JsonObject], args: argparse.Namespace
) -> None:
  """Shows the episodes of a step, or of one of its rows."""
  shown = [x for x in kept if args.row in (None, x.get('row'))]
  if not shown:
    raise UserError(f'--row={args.row}: the rows from 0 to {len(kept) - 1} are kept')
  if args.json:
    texts.print_json({'run': run.place, 'step': step, 'episodes': shown})
    return
  print(f'Step {step:,}: {len(kept)} of its episodes are kept (KEPT_EPISODES)')
  for episode in shown:
    print('\n'.join(['', *episodes.lines(episode)]))


def _compare(args: argparse.Namespace) -> None:
  if args.step is not None or args.spike or args.counts or args.row is not None:
    raise UserError('two runs are compared without --step, --row, --spike and --counts')
  one, other = (RunData(place, args.vocab or '') for place in args.files)
  found = comparison.compared(one, other)
  if args.json:
    texts.print_json(comparison.as_json(one, other, found))
  else:
    print('\n'.join(comparison.lines(one, other, found)))


def _line(spike: Spike) -> str:
  return f'step {spike.step:,}: loss {spike.loss:.4f}, and {spike.before:.4f} before it'
