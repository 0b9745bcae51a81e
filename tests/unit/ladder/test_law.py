import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.ladder.law import ScalingLaw

SIZES = [2e5, 4e5, 8e5, 1.6e6, 3.2e6]


def loss(size, limit=3.0, amplitude=20.0, exponent=0.3):
  return limit + amplitude * size**-exponent


@pytest.mark.parametrize(('limit', 'exponent'), [(3.0, 0.3), (0.0, 0.1), (1.0, 0.9)])
def test_an_exact_law_is_found(limit, exponent):
  of = lambda size: loss(size, limit, 20.0, exponent)
  law = ScalingLaw(SIZES, list(map(of, SIZES)))
  said = law.predict(1.1e7)
  assert said.loss == pytest.approx(of(1.1e7), abs=2e-3)
  assert said.high - said.low < 0.02
  assert law.exponent == pytest.approx(exponent, rel=0.02)
  low, high = law.exponent_interval()
  assert low <= law.exponent <= high


@pytest.mark.exhaustive
@pytest.mark.slow
def test_intervals_hold_as_often_as_they_say():
  """Laws and noise are drawn; 300 intervals of 90 % hold 258 to 282 times with 98 %."""
  rng, held = np.random.default_rng(0), 0
  for _ in range(300):
    exponent, limit = rng.uniform(0.1, 0.7), rng.uniform(1, 4)
    amplitude = 2 * SIZES[0] ** exponent
    noisy = lambda n, a=(limit, amplitude, exponent): loss(n, *a) + rng.normal() * 0.01
    law = ScalingLaw(SIZES, [noisy(n) for n in SIZES])
    held += law.predict(1.1e7).holds(noisy(1.1e7))
  assert 258 <= held <= 282


def test_more_seeds_make_it_surer():
  rng = np.random.default_rng(1)

  def width(seeds):
    """Returns the mean width of the intervals of 30 ladders."""
    widths = []
    for _ in range(30):
      losses = [loss(n) + rng.normal() * 0.02 for n in seeds * SIZES]
      said = ScalingLaw(seeds * SIZES, losses).predict(1.1e7)
      widths.append(said.high - said.low)
    return np.mean(widths)

  assert width(8) < 0.8 * width(1)


@pytest.mark.slow
def test_more_seeds_do_not_make_a_law_surer_that_does_not_hold():
  """The losses bend as no power does; what the law misses is no noise that seeds average away."""
  rng = np.random.default_rng(2)
  bent = lambda n: loss(n) + 0.02 * (np.log10(n) - 5.8) ** 2

  def held(seeds):
    count = 0
    for _ in range(100):
      losses = [bent(n) + rng.normal() * 0.005 for n in seeds * SIZES]
      count += ScalingLaw(seeds * SIZES, losses).predict(1.1e7).holds(bent(1.1e7))
    return count

  few, many = held(1), held(8)
  assert many >= few - 10


def test_an_exponent_that_the_sizes_do_not_determine():
  law = ScalingLaw(SIZES, [9.2, 9.11, 9.12, 9.0, 9.05])
  assert not law.is_determined
  low, high = law.exponent_interval()
  assert low <= law.exponent <= high
  assert ScalingLaw(SIZES, list(map(loss, SIZES))).is_determined


def test_the_unit_of_the_size_does_not_matter():
  losses = [loss(n) + noise for n, noise in zip(SIZES, (0.01, -0.01, 0, 0.02, 0), strict=True)]
  one = ScalingLaw(SIZES, losses).predict(1e7)
  other = ScalingLaw([n / 1e5 for n in SIZES], losses).predict(1e2)
  assert one.loss == pytest.approx(other.loss, rel=1e-6)
  assert one.high == pytest.approx(other.high, rel=1e-6)


@pytest.mark.parametrize(
  ('sizes', 'losses', 'said'),
  [
    ([1, 2, 4], [3, 2, 1.5], '3 sizes cannot determine'),
    ([1, 1, 2, 2], [3, 3, 2, 2], '2 sizes cannot determine'),
    ([1, 2, 4, 8], [3, 2, float('nan'), 1], 'a loss is not finite'),
    ([1, 2, 4, 8], [1, 2, 3, 4], 'no law fits these losses, for example if larger'),
  ],
)
def test_what_has_no_law_is_refused(sizes, losses, said):
  with pytest.raises(UserError, match=said):
    ScalingLaw(sizes, losses)
