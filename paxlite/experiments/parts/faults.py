"""When a run that goes wrong is ended, or rolled back."""

from typing import Annotated

from paxlite.config.attribute_kinds import (
  Count,
  NotNegativeInt,
  OffAtZero,
  Run,
  at_most,
)
from paxlite.core.errors import UserError
from paxlite.experiments.parts.part import Part


class Faults(
  Part, subject='Faults', beside={'LOSS_SPIKE_FACTOR': 'LOSS_SPIKE_WINDOW MAX_ROLLBACKS'}
):
  """Hangs, loss spikes and updates that are not finite: see docs/reliability.md."""

  # At most 1000: streams remember their positions before the last 1024 steps (data/base.py).
  MAX_SKIPPED_STEPS: Run[Annotated[Count, at_most(1000)]] = (
    100  # skipped updates in a row after which a run ends
  )
  STEP_TIMEOUT: Run[OffAtZero] = (
    1800.0  # seconds without a step after which a run writes its stacks and ends; 0: no limit
  )
  PHASE_TIMEOUT: Run[OffAtZero] = (
    14400.0  # most seconds for starting, restoring, compiling, and the last save; 0: no limit
  )
  STACK_TRACE_INTERVAL: Run[OffAtZero] = (
    0.0  # seconds between two stack traces, even without a hang; 0: none
  )
  LOSS_SPIKE_FACTOR: Run[OffAtZero] = (
    0.0  # multiple of the recent mean loss at which a run is rolled back; 0: off
  )
  LOSS_SPIKE_WINDOW: Run[Annotated[Count, at_most(1e6)]] = (
    100  # steps in the recent mean that LOSS_SPIKE_FACTOR compares with
  )
  MAX_ROLLBACKS: Run[NotNegativeInt] = 3  # rollbacks after which the next loss spike ends a run

  def validate(self) -> None:
    super().validate()
    if self.LOSS_SPIKE_FACTOR and self.LOSS_SPIKE_FACTOR <= 1:
      raise UserError(
        f'LOSS_SPIKE_FACTOR={self.LOSS_SPIKE_FACTOR:g} must be above 1, or 0 for none'
      )
