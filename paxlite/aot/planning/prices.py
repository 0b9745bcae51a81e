"""What machines cost: the prices of a user, and what a training run costs on each machine."""

import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from paxlite.aot import targets
from paxlite.aot.explanation_tables import columns
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.near_names import did_you_mean
from paxlite.files import schemes
from paxlite.files.json_files import read_object

_HOUR, _BILLION = 3600.0, 1e9


def read(path: str) -> dict[str, float]:
  """Returns the prices of a file by the names of targets, as they are in the file.

  The file is a JSON object: {"h100x8": 21.6, "v5e-16": 19.2}. A price is that of the whole machine
  for an hour, in any currency.

  Raises:
    UserError: The file cannot be read or has none, a target does not exist, or a price is no number
      of at least 0.
  """
  found = read_object(pathlib.Path(schemes.local(path)))
  if not found:
    raise UserError(f'--prices={path} has no prices: write {{"h100x8": 21.6, "v5e-16": 19.2}}')
  return {name: _price(f'--prices={path}: {name}', name, value) for name, value in found.items()}


def calibrated(names: Iterable[str], path: str | None) -> list[str]:
  """Returns the targets whose chip a file of measured speeds is of; UserError if there is none."""
  if path is None:
    return []
  chip = read_object(pathlib.Path(schemes.local(path))).get('chip')
  found = [name for name in names if getattr(targets.parse(name).chip, 'name', None) == chip]
  if not found:
    raise UserError(f'--calibration={path} is of {chip}, and no machine in --prices has it')
  return found


def _price(place: str, name: str, value: Json) -> float:
  if name == 'here':
    raise UserError(f'{place} is no machine to rent: `paxlite plan --target=here` plans for it')
  try:
    targets.parse(name)
  except UserError as e:
    meant = did_you_mean(name, targets.some_names())
    reason = str(e).removeprefix(f'--target={name}: ')
    raise UserError(f'{place} is no target. {meant or reason}') from None
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise UserError(f'{place}={value!r} must be a number, the price of the machine for an hour')
  if value < 0:
    raise UserError(f'{place}={value} must be at least 0')
  return float(value)


def offer(target: str, price: float, plan: JsonObject, steps: int | None) -> JsonObject:
  """Returns a machine and what a run costs on it, as an object for JSON.

  Args:
    target: Its name.
    price: For an hour, all devices together.
    plan: The JSON of its plan, in which a candidate fits.
    steps: The steps of the run; None if they are not known, or not the same on each machine.
  """
  best = plan['best'][0]
  tokens = best['rows'] * plan['seq_len'] / best['seconds']
  hours = None if steps is None else steps * best['seconds'] / _HOUR
  return {
    'target': target, 'price': price, 'fits': True, 'seconds': best['seconds'],
    'tokens_per_second': tokens, 'cost_per_billion_tokens': price * _BILLION / tokens / _HOUR,
    'hours': hours, 'cost': None if hours is None else hours * price, 'plan': plan,
  }  # fmt: skip


def refused(target: str, price: float, why: str) -> JsonObject:
  """Returns a machine on which nothing fits, or that cannot be planned for, with the reason.

  `why` is the message; what would fit is left out of it.
  """
  reason = why.partition('. What would fit: ')[0].partition('\n')[0]
  reason = reason.removeprefix(f'--target={target}').removeprefix(':').strip()
  return {'target': target, 'price': price, 'fits': False, 'reason': reason}


def as_json(
  offers: Sequence[JsonObject], name: str, steps: int | None, rows: int | None
) -> JsonObject:
  """Returns machines as an object for JSON: those that fit by the cost of tokens, and the others.

  Args:
    offers: What `offer` and `refused` return, in any order.
    name: The experiment as the user wrote it.
    steps: The steps of the whole run; None if they are not known.
    rows: The rows of the batch; None if each machine has a batch of its own.
  """
  cost = lambda o: (o['cost_per_billion_tokens'], o['seconds'])
  fit = sorted((o for o in offers if o['fits']), key=cost)
  ordered = [*fit, *(o for o in offers if not o['fits'])]
  return {'experiment': name, 'steps': steps, 'rows': rows, 'targets': ordered}


def page(found: JsonObject) -> str:
  """Returns the table of machines, as `as_json` returns them, and the command of the cheapest."""
  return '\n'.join(_page(found))


def _page(found: JsonObject) -> Iterator[str]:
  name, steps, rows, offers = found.values()
  first, reasons = offers[0], [f'  {o["target"]}: {o["reason"]}' for o in offers if not o['fits']]
  if not first['fits']:
    yield from (f'{name} fits none of these machines', *reasons)
    return
  head = f'{name}, the cheapest machine first'
  header = ['target', 'fastest mesh', '#s a step', '#tokens/s', '#price/hour']
  header += ['#cost of 10⁹ tokens']
  if first['hours'] is None:
    header.append('#rows')
  else:
    length = first['plan']['seq_len']
    tokens = f'{steps * rows * length / _BILLION:,.3g}'
    head += f': {steps:,} steps of {rows:,} rows of {length:,} tokens, {tokens} · 10⁹ tokens in all'
    header += ['#hours', '#cost of the run']
  yield from (head, '')
  yield from columns(header, [_row(o) for o in offers if o['fits']])
  command = first['plan']['best'][0]['command']
  yield from (*reasons, '', f'On {first["target"]}:', f'  {command}', '')
  if rows is None:
    yield 'Each machine has a batch of its own. With --global_batch, all train the same run.'
  elif steps is None:
    yield 'The number of steps depends on data (NUM_EPOCHS): MAX_STEPS=N gives the cost.'
  yield 'Steps alone are counted: no compiling, evaluations, checkpoints, idle hours.'


def _row(o: JsonObject) -> list[str]:
  best, hours = o['plan']['best'][0], o['hours']
  money = lambda amount: f'{amount:,.2f}' if amount >= 1 or not amount else f'{amount:.3g}'
  cells = [o['target'], best['mesh'], f'{o["seconds"]:.4g}', f'{o["tokens_per_second"]:,.0f}']
  cells += [money(o['price']), money(o['cost_per_billion_tokens'])]
  if hours is None:
    return [*cells, f'{best["rows"]:,}']
  return [*cells, f'{hours:,.1f}' if hours >= 10 else f'{hours:.3g}', money(o['cost'])]
