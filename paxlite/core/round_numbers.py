"""Round numbers: 1, 2, 5, 10, 20, 50 …"""

import math


def round_up(least: float) -> int:
  """Returns the smallest of 1, 2, 5, 10, 20, 50 … that is at least `least`."""
  power = 10 ** max(0, math.floor(math.log10(max(1.0, least))))
  return next(power * k for k in (1, 2, 5, 10) if power * k >= least)
