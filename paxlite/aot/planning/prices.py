"""What machines cost: the prices of a user, and what a training run costs on each machine."""

import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paxlite.aot import targets
from paxlite.aot.explanation_tables import columns
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.near_names import did_you_mean
from paxlite.files import schemes
from paxlite.files.json_files import read_object

_HOUR, _BILLION = 3600.0, 1e9


class Offer(NamedTuple):
  """A machine with its price, and the JSON of its plan."""

  target: str
  price: float  # for an hour, all devices together
  plan: JsonObject  # empty if no candidate fits
  reason: str = ''  # why none fits

  @property
  def seconds(self) -> float:
    """Seconds of a step with the fastest candidate that fits."""
    return float(self.plan['best'][0]['seconds'])

  @property
  def tokens_per_second(self) -> float:
    """Tokens of all devices in a second."""
    return float(self.plan['best'][0]['rows'] * self.plan['seq_len'] / self.seconds)

  @property
  def cost_per_billion(self) -> float:
    """The cost of 10⁹ tokens."""
    return self.price * _BILLION / self.tokens_per_second / _HOUR

  def hours(self, steps: int) -> float:
    """Returns the hours of a number of steps."""
    return steps * self.seconds / _HOUR


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
  found = [name for name in names if targets.parse(name).name_of_chip == chip]
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


def offer(target: str, price: float, plan: JsonObject, page: str) -> Offer:
  """Returns the offer of a machine with the JSON of its plan.

  Its page says why nothing fits, if so, and then what would fit.
  """
  if plan['best']:
    return Offer(target, price, plan)
  return Offer(target, price, {}, page.partition('. What would fit: ')[0].splitlines()[0])


def refused(target: str, price: float, why: str) -> Offer:
  """Returns the offer of a machine for which no plan was made."""
  return Offer(target, price, {}, why.removeprefix(f'--target={target}').removeprefix(':').strip())


def ordered(offers: Sequence[Offer]) -> list[Offer]:
  """Returns the offers that fit, the cheapest tokens first, and then the others as they are."""
  fit = sorted((o for o in offers if o.plan), key=lambda o: (o.cost_per_billion, o.seconds))
  return [*fit, *(o for o in offers if not o.plan)]


def page(offers: Sequence[Offer], name: str, steps: int | None, rows: int | None) -> str:
  """Returns the table of the offers, and the command of the cheapest.

  Args:
    offers: The offers, in any order.
    name: The experiment as the user wrote it.
    steps: The steps of the whole run; None if they are not known.
    rows: The rows of the batch; None if each machine has a batch of its own.
  """
  return '\n'.join(_page(ordered(offers), name, steps, rows))


def _page(offers: list[Offer], name: str, steps: int | None, rows: int | None) -> Iterator[str]:
  first, reasons = offers[0], [f'  {o.target}: {o.reason}' for o in offers if not o.plan]
  if not first.plan:
    yield from (f'{name} fits none of these machines', *reasons)
    return
  head, whole = f'{name}, the cheapest machine first', steps if rows is not None else None
  header = [
    'target',
    'fastest mesh',
    '#s a step',
    '#tokens/s',
    '#price/hour',
    '#cost of 10⁹ tokens',
  ]
  if whole is None or rows is None:
    header.append('#rows')
  else:
    length = first.plan['seq_len']
    tokens = f'{whole * rows * length / _BILLION:,.3g}'
    head += f': {whole:,} steps of {rows:,} rows of {length:,} tokens, {tokens} · 10⁹ tokens in all'
    header += ['#hours', '#cost of the run']
  yield from (head, '')
  yield from columns(header, [_row(o, whole) for o in offers if o.plan])
  yield from (*reasons, '', f'On {first.target}:', '  ' + first.plan['best'][0]['command'], '')
  if rows is None:
    yield 'Each machine has a batch of its own. With --global_batch, all train the same run.'
  elif steps is None:
    yield 'The number of steps depends on data (NUM_EPOCHS): MAX_STEPS=N gives the cost.'
  yield 'Steps alone are counted: no compiling, evaluations, checkpoints, idle hours.'


def _row(o: Offer, steps: int | None) -> list[str]:
  best = o.plan['best'][0]
  speeds = f'{o.seconds:.4g}', f'{o.tokens_per_second:,.0f}'
  cells = [o.target, best['mesh'], *speeds, _money(o.price), _money(o.cost_per_billion)]
  if steps is None:
    return [*cells, f'{best["rows"]:,}']
  hours = o.hours(steps)
  return [*cells, f'{hours:,.1f}' if hours >= 10 else f'{hours:.3g}', _money(hours * o.price)]


def _money(amount: float) -> str:
  return f'{amount:,.2f}' if amount >= 1 or not amount else f'{amount:.3g}'


def as_json(
  offers: Sequence[Offer], name: str, steps: int | None, rows: int | None
) -> Mapping[str, Json]:
  """Returns the offers as an object for JSON, the cheapest first; see `page` for the arguments."""

  def one(o: Offer) -> JsonObject:
    found: JsonObject = {'target': o.target, 'price': o.price, 'fits': bool(o.plan)}
    if not o.plan:
      return found | {'reason': o.reason}
    hours = None if steps is None or rows is None else o.hours(steps)
    return found | {
      'seconds': o.seconds, 'tokens_per_second': o.tokens_per_second,
      'cost_per_billion_tokens': o.cost_per_billion, 'hours': hours,
      'cost': None if hours is None else hours * o.price, 'plan': o.plan,
    }  # fmt: skip

  offered = [one(o) for o in ordered(offers)]
  return {'experiment': name, 'steps': steps, 'rows': rows, 'targets': offered}
