"""A plan as a page of text and as JSON, for the arguments of the command."""

import argparse
import shlex

from paxlite.aot.explanation_tables import columns, size
from paxlite.aot.planning.search import Judged, Plan
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject


def page(plan: Plan, args: argparse.Namespace) -> str:
  """Returns a table of the candidates that fit, and the command of the first one."""
  machine, best = plan.space.machine, plan.best
  done = 'measured' if machine.measured else 'compiled'
  failed = sum(bool(j.verdict.error) for j in plan.judged)
  lines = [
    f'{args.fdl_config} on {machine.name}: of {plan.considered:,} candidates, {len(plan.judged)} '
    f'were {done}, {len(best)} fit' + (f', {failed} failed' if failed else '')
  ]
  if best:
    header = ['#s a step', '#tokens/s a device', f'#of {size(machine.memory)}', 'most of the step']
    table = [_row(plan, judged) for judged in best]
    lines += ['', *columns([*header, 'the fastest for each row first'], table)]
    if len(kinds := {j.candidate.layout.has_experts: j for j in reversed(best)}) > 1:
      split, whole = kinds[True], kinds[False]
      ratio = f'{split.row_seconds / whole.row_seconds:.2f} of the time of {whole.candidate.layout}'
      lines += ['', f'Expert parallelism: {split.candidate.layout} takes {ratio} for each row']
    lines += ['', 'The first one:', f'  {command(plan, best[0], args)}']
    try:
      plan.space.experiment.train_input()
    except UserError as e:
      lines += ['', f'Before you train: {e}']
  if plan.interrupted:
    lines += ['', 'Interrupted: this is the best so far; the same command continues from here']
  return '\n'.join(lines)


def _row(plan: Plan, judged: Judged) -> list[str]:
  v, c = judged.verdict, judged.candidate
  tokens = c.rows * plan.space.experiment.MAX_SEQ_LEN / v.seconds / plan.space.machine.devices
  memory = size(v.memory) + (f' + {size(v.host)} of the host' if v.host else '')
  return [f'{v.seconds:.4g}', f'{tokens:,.0f}', memory, v.bound, str(c)]


def command(plan: Plan, judged: Judged, args: argparse.Namespace) -> str:
  """Returns the command that trains a candidate."""
  own = lambda attribute: getattr(type(plan.space.experiment), attribute, None)
  chosen = judged.candidate.attributes
  words = [f'--fiddler={shlex.quote(f)}' for f in args.fiddler]
  words += [shell.flag(n, text) for n, text in args.attributes.items() if n not in chosen]
  rows = chosen['PERCORE_BATCH_SIZE']
  chosen['PERCORE_BATCH_SIZE'] = int(rows) if float(rows).is_integer() else rows
  words += [shell.flag(n, value) for n, value in chosen.items() if value != own(n)]
  share = plan.space.machine.share
  environment = f'XLA_PYTHON_CLIENT_MEM_FRACTION={share} ' if share else ''
  return environment + ' '.join(['paxlite train', args.fdl_config, *words])


def as_json(plan: Plan, args: argparse.Namespace) -> list[JsonObject]:
  """Returns what was judged as objects for JSON: those that fit as on the page, then all others."""
  ordered = (*plan.best, *(j for j in plan.judged if not j.fits))
  return [
    {
      'candidate': str(j.candidate), 'rows': j.candidate.rows, 'fits': j.fits,
      **j.verdict._asdict(), 'command': command(plan, j, args),
    }
    for j in ordered
  ]  # fmt: skip
