"""What machines cost: the prices of a user, and what a training run costs on each machine."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from paxlite.aot import step_calibration, targets
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.near_names import did_you_mean
from paxlite.files import schemes
from paxlite.files.json_files import read_object

_HOUR = 3600.0
_BILLION = 1e9


@dataclasses.dataclass(frozen=True)
class Offer:
  """A machine with its price, and what its plan says.

  Attributes:
    target: Its name.
    price: What it costs for an hour, all devices together.
    plan: The JSON of its plan, with at least one candidate that fits; empty if none does.
    reason: Why there is none; '' if there is one.
  """

  target: str
  price: float
  plan: JsonObject
  reason: str = ''

  @property
  def seconds(self) -> float:
    """Seconds of a step with the fastest candidate that fits."""
    return float(self.plan['best'][0]['seconds'])

  @property
  def tokens_per_second(self) -> float:
    """Tokens of all devices in a second."""
    best = self.plan['best'][0]
    return float(best['rows'] * self.plan['seq_len'] / best['seconds'])

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
  return {name: _price(path, name, value) for name, value in found.items()}


def calibrated(names: Iterable[str], calibration: str | None) -> list[str]:
  """Returns the targets whose chip a calibration is of; none without one.

  Raises:
    UserError: The calibration cannot be read, or is of another chip than all targets.
  """
  if calibration is None:
    return []
  chip = read_object(step_calibration.file_of(calibration)).get('chip')
  found = [name for name in names if targets.parse(name).name_of_chip == chip]
  if not found:
    raise UserError(f'--calibration={calibration} is of {chip}, and no machine in --prices has it')
  targets.parse(found[0], calibration)
  return found


def _price(path: str, name: str, value: Json) -> float:
  place = f'--prices={path}: {name}'
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
  """Returns the offer of a machine for which a plan was made.

  Args:
    target: Its name.
    price: What it costs for an hour.
    plan: The plan as JSON.
    page: Its page; where nothing fits, it says why, and then what would fit.
  """
  if plan['best']:
    return Offer(target, price, plan)
  return Offer(target, price, {}, page.partition('. What would fit: ')[0].splitlines()[0])


def refused(target: str, price: float, why: str) -> Offer:
  """Returns the offer of a machine for which no plan was made."""
  reason = why.removeprefix(f'--target={target}').removeprefix(':').strip()
  return Offer(target, price, {}, reason)


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
  in_order = ordered(offers)
  first = in_order[0]
  if not first.plan:
    return '\n'.join([f'{name} fits none of these machines', *map(_reason, in_order)])
  whole = steps is not None and rows is not None
  head = f'{name}, the cheapest machine first'
  if steps is not None and rows is not None:
    length = first.plan['seq_len']
    tokens = f'{steps * rows * length / _BILLION:,.3g}'
    head += f': {steps:,} steps of {rows:,} rows of {length:,} tokens, {tokens} · 10⁹ tokens in all'
  header = ['target', 'fastest mesh', 's a step', 'tokens/s', 'price/hour', 'cost of 10⁹ tokens']
  header += ['hours', 'cost of the run'] if whole else ['rows']
  fit = [o for o in in_order if o.plan]
  lines = _columns([header, *(_row(o, steps if whole else None) for o in fit)])
  lines += map(_reason, in_order[len(fit) :])
  lines += ['', f'On {first.target}:', '  ' + first.plan['best'][0]['command'], '']
  if rows is None:
    lines.append(
      'Each machine has a batch of its own. With --global_batch, all train the same run.'
    )
  elif steps is None:
    lines.append('The number of steps depends on data (NUM_EPOCHS): MAX_STEPS=N gives the cost.')
  lines.append('Steps alone are counted: no compiling, evaluations, checkpoints, idle hours.')
  said = dict.fromkeys(o.plan.get('calibration') for o in fit)
  lines += filter(None, said)
  if len(said) > 1 and None in said:
    lines.append('Seconds of the other chips are as foreseen.')
  return '\n'.join([head, '', *lines])


def _reason(offer: Offer) -> str:
  return f'  {offer.target}: {offer.reason}'


def _row(offer: Offer, steps: int | None) -> list[str]:
  best = offer.plan['best'][0]
  cells = [
    offer.target, best['mesh'] or 'one device', f'{offer.seconds:.4g}',
    f'{offer.tokens_per_second:,.0f}', _money(offer.price), _money(offer.cost_per_billion),
  ]  # fmt: skip
  if steps is None:
    return [*cells, f'{best["rows"]:,}']
  hours = offer.hours(steps)
  return [*cells, f'{hours:,.1f}' if hours >= 10 else f'{hours:.3g}', _money(hours * offer.price)]


def _money(amount: float) -> str:
  return f'{amount:,.2f}' if amount >= 1 or not amount else f'{amount:.3g}'


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines whose first two columns are aligned to the left, and the others to the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    cells = [
      cell.ljust(width) if i < 2 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    lines.append('  ' + '  '.join(cells).rstrip())
  return lines


def as_json(
  offers: Sequence[Offer], name: str, steps: int | None, rows: int | None
) -> Mapping[str, Json]:
  """Returns the offers as an object for JSON, the cheapest first; see `page` for the arguments."""

  def one(o: Offer) -> JsonObject:
    if not o.plan:
      return {'target': o.target, 'price': o.price, 'fits': False, 'reason': o.reason}
    whole = steps if rows is not None else None
    return {
      'target': o.target,
      'price': o.price,
      'fits': True,
      'seconds': o.seconds,
      'tokens_per_second': o.tokens_per_second,
      'cost_per_billion_tokens': o.cost_per_billion,
      'hours': None if whole is None else o.hours(whole),
      'cost': None if whole is None else o.hours(whole) * o.price,
      'plan': o.plan,
    }

  return {
    'experiment': name,
    'steps': steps,
    'rows': rows,
    'targets': [one(o) for o in ordered(offers)],
  }
