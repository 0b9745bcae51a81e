"""A plan as a page of text and as JSON."""

import shlex
from collections.abc import Mapping, Sequence

from paxlite.aot.planning import choices
from paxlite.aot.planning.search import Judged, Plan, Point, size
from paxlite.aot.planning.store import Verdict
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.base import Experiment

_FRONT = 8  # points of the front that the page shows


def page(plan: Plan, name: str, given: Mapping[str, str], fiddlers: Sequence[str] = ()) -> str:
  """Returns the page.

  Args:
    plan: The plan.
    name: The experiment as the user wrote it.
    given: The attributes that the user set, as text.
    fiddlers: Functions that edit the config, as the user wrote them.
  """
  machine = plan.space.machine
  how = 'measured' if machine.measured else "by the compiler's schedule"
  found = f'the fastest for each row of a batch, {how}' if plan.best else 'no candidate fits so far'
  lines = [f'{name} on {machine.name}: {found}']
  for i, judged in enumerate(plan.best[:3]):
    lines += [
      '',
      *_candidate(plan, judged, i + 1),
      '   ' + command(plan, judged, name, given, fiddlers),
    ]
  if plan.best:
    lines += _missing(plan.space.experiment)
  if plan.front:
    lines += ['', 'Memory against time (~: predicted, not compiled)']
    lines += [f'  {line}' for line in map(_point, _thinned(plan.front))]
  return '\n'.join([*lines, '', *_counts(plan)])


def _candidate(plan: Plan, judged: Judged, rank: int) -> list[str]:
  v, c, machine = judged.verdict, judged.candidate, plan.space.machine
  tokens = c.rows * plan.space.experiment.MAX_SEQ_LEN / v.seconds / machine.devices
  lines = [
    f'{rank}. {v.seconds:.4g} s a step of {c.rows:,} rows, {tokens:,.0f} tokens/s a device; '
    f'{size(v.memory)} of {size(machine.memory)}{_on_host(v)}',
    f'   {c}',
  ]
  if len(v.mfu) == 2:
    lines.append(f'   MFU is at most {v.mfu[0]:.0%}; {v.mfu[1]:.0%} if everything overlapped.')
  if v.parts:
    total = sum(v.parts.values()) or 1.0
    parts = sorted(v.parts.items(), key=lambda x: -x[1])
    lines.append('   ' + ', '.join(f'{n / total:.0%} {part}' for part, n in parts if n > 0))
  if v.note:
    lines.append(f'   {v.note}')
  return lines


def _missing(experiment: Experiment) -> list[str]:
  """Returns what the experiment lacks, so that the printed commands cannot train it yet."""
  try:
    experiment.train_input()
  except UserError as e:
    return ['', f'Before you train: {e}']
  return []


def _on_host(verdict: Verdict) -> str:
  return f', and {size(verdict.host)} of its host' if verdict.host else ''


def command(
  plan: Plan, judged: Judged, name: str, given: Mapping[str, str], fiddlers: Sequence[str] = ()
) -> str:
  """Returns the command that trains a candidate."""
  words = [f'--fiddler={shlex.quote(f)}' for f in fiddlers]
  e = plan.space.experiment
  chosen = judged.candidate.attributes
  if 'MAX_SEQ_LEN' not in given and getattr(type(e), 'MAX_SEQ_LEN', None) != e.MAX_SEQ_LEN:
    chosen['MAX_SEQ_LEN'] = e.MAX_SEQ_LEN
  words += [shlex.quote(f'{n}={text}') for n, text in given.items() if n not in chosen]
  for attribute, value in choices.flags(chosen, e).items():
    if attribute == 'PERCORE_BATCH_SIZE' and isinstance(value, float) and value.is_integer():
      value = int(value)
    words.append(shell.flag(attribute, value))
  share = plan.space.machine.share
  environment = f'XLA_PYTHON_CLIENT_MEM_FRACTION={share} ' if share else ''
  return environment + ' '.join(['paxlite train', name, *words])


def _point(point: Point) -> str:
  mark = ' ' if point.judged else '~'
  c = point.candidate
  return f'{mark}{size(point.memory):>10}  {mark}{point.row_seconds * 1e3:9.3f} ms a row  {c}'


def _thinned(front: Sequence[Point]) -> list[Point]:
  """Returns some points of a front, with its ends."""
  if len(front) <= _FRONT:
    return list(front)
  return [front[round(i * (len(front) - 1) / (_FRONT - 1))] for i in range(_FRONT)]


def _counts(plan: Plan) -> list[str]:
  judged = [j for j in plan.judged if not j.verdict.error]
  compiled = 'measured' if plan.space.machine.measured else 'compiled'
  lines = [
    f'{plan.considered:,} candidates estimated in {plan.estimating:.1f} s, '
    f'{len(judged)} {compiled}, {plan.spent:.0f} s in all'
  ]
  if (off := foreseen(plan)) is not None:
    lines.append(f'Memory was predicted within {off:.1%} of what the compiler said then (median)')
  if failed := len(plan.judged) - len(judged):
    lines.append(f'{failed} failed')
  if calibration := plan.space.machine.calibration:
    lines.append(calibration)
  if plan.interrupted:
    lines.append('Interrupted: this is the best so far; the same command continues from here')
  return lines


def foreseen(plan: Plan) -> float | None:
  """Returns the median error of predictions of memory, made after the first four verdicts."""
  off = sorted(j.off for j in plan.judged[4:] if j.verdict.memory and not j.verdict.error)
  return off[len(off) // 2] if off else None


def as_json(plan: Plan, name: str, given: Mapping[str, str]) -> JsonObject:
  """Returns the plan as an object for JSON."""
  machine = plan.space.machine

  def one(j: Judged) -> JsonObject:
    v = j.verdict
    return {
      'candidate': str(j.candidate),
      'mesh': str(j.candidate.layout),
      'values': j.candidate.attributes,
      'rows': j.candidate.rows,
      'fits': j.fits,
      'memory': v.memory,
      'host_memory': v.host,
      'note': v.note,
      'foreseen_memory': j.foreseen,
      'estimated_memory': j.estimate.memory,
      'seconds': v.seconds,
      'estimated_seconds': j.estimate.seconds,
      'mfu': list(v.mfu),
      'parts': dict(v.parts),
      'bound': v.bound,
      'error': v.error,
    }

  return {
    'experiment': name,
    'target': machine.name,
    'devices': machine.devices,
    'calibration': machine.calibration or None,
    'seq_len': plan.space.experiment.MAX_SEQ_LEN,
    'memory_limit': machine.memory,
    'considered': plan.considered,
    'estimating_seconds': plan.estimating,
    'seconds': plan.spent,
    'interrupted': plan.interrupted,
    'best': [{**one(j), 'command': command(plan, j, name, given)} for j in plan.best[:3]],
    'front': [
      {
        'candidate': str(p.candidate),
        'values': p.candidate.attributes,
        'memory': p.memory,
        'row_seconds': p.row_seconds,
        'judged': p.judged,
      }
      for p in plan.front
    ],
    'judged': [one(j) for j in plan.judged],
  }
