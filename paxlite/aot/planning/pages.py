"""A plan as a page of text and as JSON."""

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence

from paxlite.aot.explanation_tables import size
from paxlite.aot.planning.search import Judged, Plan
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject


def page(plan: Plan, name: str, given: Mapping[str, str], fiddlers: Sequence[str] = ()) -> str:
  """Returns the page about a plan for what the user wrote: experiment, attributes, fiddlers."""
  machine = plan.space.machine
  how = 'measured' if machine.measured else "by the compiler's schedule"
  found = f'the fastest for each row of a batch, {how}' if plan.best else 'no candidate fits so far'
  lines = [f'{name} on {machine.name}: {found}']
  for rank, judged in enumerate(plan.best[:3], 1):
    lines += ['', *_candidate(plan, judged, rank)]
    lines.append('   ' + command(plan, judged, name, given, fiddlers))
  if plan.best:
    try:
      plan.space.experiment.train_input()
    except UserError as e:
      lines += ['', f'Before you train: {e}']
  return '\n'.join([*lines, '', *_counts(plan)])


def _candidate(plan: Plan, judged: Judged, rank: int) -> Iterator[str]:
  v, c, machine = judged.verdict, judged.candidate, plan.space.machine
  tokens = c.rows * plan.space.experiment.MAX_SEQ_LEN / v.seconds / machine.devices
  on_host = f', and {size(v.host)} of its host' if v.host else ''
  yield (
    f'{rank}. {v.seconds:.4g} s a step of {c.rows:,} rows, {tokens:,.0f} tokens/s a device; '
    f'{size(v.memory)} of {size(machine.memory)}{on_host}'
  )
  yield f'   {c}'
  if len(v.mfu) == 2:
    yield f'   MFU is at most {v.mfu[0]:.0%}; {v.mfu[1]:.0%} if everything overlapped.'
  if parts := {name: seconds for name, seconds in v.parts.items() if seconds > 0}:
    order, total = sorted(parts, key=lambda name: -parts[name]), sum(parts.values())
    yield '   ' + ', '.join(f'{parts[name] / total:.0%} {name}' for name in order)
  if v.note:
    yield f'   {v.note}'


def command(
  plan: Plan, judged: Judged, name: str, given: Mapping[str, str], fiddlers: Sequence[str] = ()
) -> str:
  """Returns the command that trains a candidate."""
  e = plan.space.experiment
  stated = lambda attribute: getattr(type(e), attribute, None)
  chosen = judged.candidate.attributes
  if 'MAX_SEQ_LEN' not in given and stated('MAX_SEQ_LEN') != e.MAX_SEQ_LEN:
    chosen['MAX_SEQ_LEN'] = e.MAX_SEQ_LEN
  words = [f'--fiddler={shlex.quote(f)}' for f in fiddlers]
  words += [shlex.quote(f'{n}={text}') for n, text in given.items() if n not in chosen]
  rows = chosen['PERCORE_BATCH_SIZE']
  chosen['PERCORE_BATCH_SIZE'] = int(rows) if float(rows).is_integer() else rows
  words += [assigned(n, value) for n, value in chosen.items() if value != stated(n)]
  share = plan.space.machine.share
  environment = f'XLA_PYTHON_CLIENT_MEM_FRACTION={share} ' if share else ''
  return environment + ' '.join(['paxlite train', name, *words])


def assigned(attribute: str, value: object) -> str:
  """Returns NAME=VALUE for a shell."""
  return shell.flag(attribute, value).replace('--fdl.', '', 1)


def _counts(plan: Plan) -> Iterator[str]:
  judged = [j for j in plan.judged if not j.verdict.error]
  done = 'measured' if plan.space.machine.measured else 'compiled'
  yield (
    f'{plan.considered:,} candidates estimated in {plan.estimating:.1f} s, '
    f'{len(judged)} {done}, {plan.spent:.0f} s in all'
  )
  off = [abs(j.predicted / j.verdict.memory - 1) for j in plan.judged[4:] if j.verdict.memory]
  if off:
    yield f'Memory was predicted within {statistics.median(off):.1%} (median) before it was known'
  if failed := len(plan.judged) - len(judged):
    yield f'{failed} failed'
  if plan.interrupted:
    yield 'Interrupted: this is the best so far; the same command continues from here'


def as_json(plan: Plan, name: str, given: Mapping[str, str]) -> JsonObject:
  """Returns the plan as an object for JSON."""
  machine = plan.space.machine

  def one(j: Judged) -> JsonObject:
    v = j.verdict
    return {
      'candidate': str(j.candidate), 'mesh': str(j.candidate.layout),
      'values': j.candidate.attributes, 'rows': j.candidate.rows, 'fits': j.fits,
      'memory': v.memory, 'host_memory': v.host, 'predicted_memory': j.predicted,
      'estimated_memory': j.estimate.memory, 'seconds': v.seconds,
      'estimated_seconds': j.estimate.seconds, 'mfu': list(v.mfu), 'parts': dict(v.parts),
      'bound': v.bound, 'note': v.note, 'error': v.error,
    }  # fmt: skip

  return {
    'experiment': name, 'target': machine.name, 'devices': machine.devices,
    'seq_len': plan.space.experiment.MAX_SEQ_LEN, 'memory_limit': machine.memory,
    'considered': plan.considered, 'estimating_seconds': plan.estimating, 'seconds': plan.spent,
    'interrupted': plan.interrupted,
    'best': [{**one(j), 'command': command(plan, j, name, given)} for j in plan.best[:3]],
    'judged': [one(j) for j in plan.judged],
  }  # fmt: skip
