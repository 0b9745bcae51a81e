"""Limits the number of steps skipped for a non-finite gradient or loss."""

import dataclasses
from collections.abc import Callable

from paxlite.core.errors import TrainingError
from paxlite.core.wording import amount
from paxlite.training.train_state import TrainState


class NotFiniteError(TrainingError):
  """Too many steps in a row were skipped.

  Attributes:
    step: The last one of them.
  """

  def __init__(self, message: str, step: int):
    super().__init__(message)
    self.step = step


@dataclasses.dataclass(frozen=True)
class SkippedSteps:
  """Ends a run that skips too many steps."""

  limit: int  # number of skipped steps in a row that ends the run (MAX_SKIPPED_STEPS)
  rows: Callable[[int], str]  # describes the rows of a step's batch, for messages

  def check(self, in_a_row: int, step: int) -> None:
    """Raises NotFiniteError if the last `in_a_row` steps, up to `step`, reach the limit."""
    if in_a_row >= self.limit:
      first = step - in_a_row
      raise NotFiniteError(
        f'{amount(in_a_row, "step")} in a row had a non-finite gradient, from step {first} on '
        f'(MAX_SKIPPED_STEPS={self.limit}). The last good state is step {first}; lower '
        f'LEARNING_RATE, or look at the data of that step: {self.rows(first)}',
        step,
      )

  def check_all(self, skipped: int, steps: int) -> None:
    """Raises TrainingError if more than half of the steps of a complete run were skipped."""
    if 2 * skipped > steps:
      raise TrainingError(
        f'{skipped:,} of {steps:,} steps had a non-finite gradient or loss and changed nothing. '
        "The others' training is saved; lower LEARNING_RATE, or look at the data"
      )


def last_good(state: TrainState) -> TrainState:
  """Returns the state before the last skipped steps, which changed only its counters."""
  in_a_row = state.skipped_in_a_row
  return dataclasses.replace(
    state, step=state.step - in_a_row, skipped=state.skipped - in_a_row,
    skipped_in_a_row=in_a_row * 0,
  )  # fmt: skip
