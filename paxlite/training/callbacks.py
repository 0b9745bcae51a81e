"""What a user adds to the training loop: code that is called while a run goes."""

from collections.abc import Mapping

from paxlite.training.summaries import Summaries
from paxlite.training.train_state import TrainState

# metrics by their names, for each evaluation input
Evaluations = Mapping[str, Mapping[str, float]]


class Callback:
  """Called by the training loop in every process; a subclass overrides what it needs.

  An experiment returns its callbacks from `callbacks()`. An exception ends the run.
  """

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> None:
    """Called after the evaluation of a step.

    Args:
      state: The state after `step` steps. It must not be kept: the next step overwrites it.
      step: Number of steps done.
      evaluations: The metrics of every evaluation input.
      summaries: Prints lines and sends numbers and texts to all writers.
    """
