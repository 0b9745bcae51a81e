"""The result of a ladder: predicted loss, its uncertainty, and the learning rate."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.ladder.law import MIN_SIZES, Prediction, ScalingLaw
from paxlite.ladder.rungs import Rung
from paxlite.ladder.sizes import Parameters, Size

CONFIDENCE = 0.9


@dataclasses.dataclass(frozen=True)
class LadderFit:
  """The losses of a ladder's runs, and the law fitted to them."""

  losses: Sequence[tuple[Rung, float]]  # the rungs, and the loss of each
  asked: Size  # the size that the ladder was asked about
  parameters: Parameters  # the numbers of its parameters

  @property
  def rates(self) -> list[float]:
    """The factors of learning rates."""
    return sorted({rung.rate for rung, _ in self.losses})

  @property
  def sizes(self) -> list[tuple[Size, Parameters]]:
    """The sizes, with the numbers of their parameters, the smallest first."""
    found = {(rung.size, rung.parameters) for rung, _ in self.losses}
    return sorted(found, key=lambda s: s[1].blocks)

  def mean(self, size: Size, rate: float) -> float:
    """The mean loss of a size over the seeds."""
    return statistics.fmean(x for r, x in self.losses if (r.size, r.rate) == (size, rate))

  def best_rate(self, size: Size) -> float:
    """The learning-rate factor with the lowest loss for a size."""
    return min(self.rates, key=lambda rate: self.mean(size, rate))

  @property
  def rate(self) -> float:
    """The learning-rate factor with the lowest losses over all sizes.

    Raises:
      UserError: With each factor, the loss of some size was not finite.
    """
    total = lambda rate: sum(self.mean(size, rate) for size, _ in self.sizes)
    found = min(self.rates, key=total)
    if not math.isfinite(total(found)):
      raise UserError(
        'at every learning rate the loss of some size was not finite: choose a smaller '
        'LEARNING_RATE, or smaller --rates'
      )
    return found

  def law(self, without: Size | None = None) -> ScalingLaw:
    """The law through the losses at the best learning rate, optionally without one size."""
    rate = self.rate
    points = [
      (r.parameters.blocks, x) for r, x in self.losses if r.rate == rate and r.size != without
    ]
    return ScalingLaw(*zip(*points, strict=True))

  @property
  def predicted(self) -> Prediction:
    """The loss of the requested size."""
    return self.law().predict(self.parameters.blocks, CONFIDENCE)

  @property
  def check(self) -> tuple[Size, float, Prediction] | None:
    """The largest size, its loss, and its prediction by the law of all others.

    None if the others are too few for a law.
    """
    if len(self.sizes) <= MIN_SIZES:
      return None
    largest, parameters = self.sizes[-1]
    law = self.law(without=largest)
    return largest, self.mean(largest, self.rate), law.predict(parameters.blocks, CONFIDENCE)

  @property
  def text(self) -> str:
    """The answer as lines for a terminal."""
    law, rate, predicted = self.law(), self.rate, self.predicted
    rows = [('size', 'parameters', 'in blocks', 'loss', 'by the law')]
    for size, parameters in self.sizes:
      cells = f'{self.mean(size, rate):.4f}', f'{law.predict(parameters.blocks).loss:.4f}'
      rows.append((str(size), *_counts(parameters), *cells))
    between = f'{predicted.low:.4f} and {predicted.high:.4f}'
    rows.append((str(self.asked), *_counts(self.parameters), '', f'{predicted.loss:.4f}'))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = lambda row: '  '.join(f'{x:>{w}}' for x, w in zip(row, widths, strict=True)).rstrip()
    lines = [
      *map(line, rows),
      '',
      f'{self.asked} is predicted to reach {predicted.loss:.4f}, and with {CONFIDENCE:.0%} between '
      f'{between}.',
      self._law_line(law),
      *self._check_lines,
      *self._rate_lines,
    ]
    return '\n'.join(lines)

  def _law_line(self, law: ScalingLaw) -> str:
    low, high = law.exponent_interval(CONFIDENCE)
    between = f'between {low:.2g} and {high:.2g} ({CONFIDENCE:.0%})'
    if not law.is_determined:
      return f'These sizes do not determine the exponent of the law, which is {between}.'
    return (
      f'The law is about {law.limit:.3f} + {law.amplitude:.3g} · (parameters in blocks)^-'
      f'{law.exponent:.3f}; its exponent is {between}.'
    )

  @property
  def _check_lines(self) -> list[str]:
    found = self.check
    if found is None:
      return []
    size, loss, said = found
    verdict = 'which holds' if said.holds(loss) else 'which does not hold'
    return [
      f'Without {size}, the law predicts between {said.low:.4f} and {said.high:.4f} for it; it '
      f'reached {loss:.4f}, {verdict}.'
    ]

  @property
  def _rate_lines(self) -> list[str]:
    if len(self.rates) == 1:
      return []
    lines = ['', 'Losses by the factor of LEARNING_RATE; * is the best of a size:']
    rows = [['size', *(f'{rate:g}' for rate in self.rates)]]
    for size, _ in self.sizes:
      best = self.best_rate(size)
      cell = lambda rate, s=size, b=best: f'{self.mean(s, rate):.4f}{"*" if rate == b else " "}'
      rows.append([str(size), *map(cell, self.rates)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ['  '.join(f'{x:>{w}}' for x, w in zip(row, widths, strict=True)) for row in rows]
    if len({self.best_rate(size) for size, _ in self.sizes}) == 1:
      lines.append(f'All sizes learn best with {self.rate:g}.')
    else:
      lines.append(f'{self.rate:g} is the best for all sizes together.')
    if self.rate in (self.rates[0], self.rates[-1]):
      lines.append('It is at the end of --rates: a factor beyond it may be better.')
    return lines

  @property
  def json(self) -> JsonObject:
    """The answer as JSON."""
    law, predicted, check = self.law(), self.predicted, self.check
    runs = [
      dict(
        size=str(rung.size), **_json(rung.parameters), rate=rung.rate, seed=rung.seed,
        loss=loss if math.isfinite(loss) else None, command=rung.command,
      )
      for rung, loss in self.losses
    ]  # fmt: skip
    interval = lambda p: dict(loss=p.loss, low=p.low, high=p.high)
    found: JsonObject = dict(
      runs=runs,
      rate=self.rate,
      law=dict(
        limit=law.limit, amplitude=law.amplitude, exponent=law.exponent,
        exponent_interval=list(law.exponent_interval(CONFIDENCE)),
      ),
      predicted=dict(
        size=str(self.asked), **_json(self.parameters), confidence=CONFIDENCE,
        **interval(predicted),
      ),
    )  # fmt: skip
    if check is not None:
      size, loss, said = check
      found['check'] = dict(size=str(size), reached=loss, holds=said.holds(loss), **interval(said))
    return found


def _counts(parameters: Parameters) -> tuple[str, str]:
  return f'{parameters.all:,}', f'{parameters.blocks:,}'


def _json(parameters: Parameters) -> dict[str, int]:
  return dict(parameters=parameters.all, parameters_in_blocks=parameters.blocks)
