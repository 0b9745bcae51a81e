"""The number of steps of a run that states epochs."""

import math

from paxlite.core.errors import UserError
from paxlite.data.base import Input, OnPolicyInput, RowInput
from paxlite.experiments.base import Experiment


def max_steps(e: Experiment, data: Input) -> int:
  """Returns the number of steps in which `data` is read NUM_EPOCHS times, rounded up.

  Raises UserError if the number of rows is not known: the data is a stream, a mixture or rollouts.
  """
  assert e.NUM_EPOCHS is not None
  if not isinstance(data, RowInput):
    kind = 'has rollouts' if isinstance(data, OnPolicyInput) else 'is a stream or a mixture'
    raise UserError(
      f'NUM_EPOCHS={e.NUM_EPOCHS:g}: {data.name} {kind}, so its length is unknown: set '
      'NUM_EPOCHS=None and MAX_STEPS=N'
    )
  exact = e.NUM_EPOCHS * len(data.source) / data.batch_size
  return max(1, math.ceil(round(exact, 6)))  # 0.1 · 30 is not 3 in floating point
