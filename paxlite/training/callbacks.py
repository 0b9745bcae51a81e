"""The events of the training loop, and what is called at them: paxlite's own parts and a user's."""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

from paxlite.core.json_text import JsonObject
from paxlite.losses.metrics import Metrics
from paxlite.tracking.summaries import Summaries
from paxlite.training.train_state import TrainState

# metrics by their names, for each evaluation input
Evaluations = Mapping[str, Mapping[str, float]]


class LoopRequest(enum.Enum):
  """What a callback may return to change the course of the loop."""

  END = 'training ends after this step'
  ROLL_BACK = 'the run continues from the last good checkpoint before this step'

  @classmethod
  def of(cls, answers: Iterable[object]) -> 'LoopRequest | None':
    """Returns what several callbacks request: a rollback goes before an end."""
    found = [answer for answer in answers if isinstance(answer, LoopRequest)]
    return cls.ROLL_BACK if cls.ROLL_BACK in found else next(iter(found), None)


@dataclasses.dataclass(frozen=True)
class Loop:
  """What the training loop offers to callbacks.

  Attributes:
    summaries: Prints lines and sends numbers and texts to all writers.
    paused: paused(state, kind) is a context whose time counts as `kind`, one of goodput.KINDS, and
      not as training. It waits for the devices first.
    metadata: metadata(step) begins to collect what a checkpoint of the step says beside the
      state, and returns a function that waits for it. Every process must call it.
  """

  summaries: Summaries
  paused: Callable[[TrainState, str], contextlib.AbstractContextManager[None]]
  metadata: Callable[[int], Callable[[], JsonObject]]


class Callback:
  """Listens to the events of the training loop; a subclass overrides the methods that it needs.

  An experiment returns its callbacks from `callbacks()`. At each event the order is: loss spikes,
  the best checkpoint, those of `callbacks()`, the profiler, those of extensions. A class whose
  `rank` is not 0 goes before or after all of these: the records of the data and local states have
  -1, samples have 1.

  Every process calls them, and must get the same requests from them. An exception ends the run with
  the line that raised it. A run of one process first saves its state, except in `resume`, in
  `on_start`, and in the events after a save.

  `state` is the state after `step` steps. It must not be kept, because the next step overwrites it.
  """

  END = LoopRequest.END
  ROLL_BACK = LoopRequest.ROLL_BACK
  rank = 0  # callbacks are called by ascending ranks

  def start_lines(self) -> Sequence[str]:
    """Returns lines that a start of training prints."""
    return ()

  def resume(self, step: int) -> LoopRequest | None:
    """Called with the step that a run continues from, 0 at first; maybe twice with the same step.

    Returns:
      END if the run had ended there, so that there is nothing left to do.
    """

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called before the first step of a start, and again after a rollback to `step`."""

  def before_step(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called before the batch of the next step is drawn; evaluation and save of `step` are done."""

  def after_step(
    self, state: TrainState, step: int, metrics: Metrics, loop: Loop
  ) -> LoopRequest | None:
    """Called when a step is dispatched, which the devices may still be computing.

    Args:
      state: The state after the step.
      step: Number of steps done, including this one.
      metrics: Its metrics by TensorBoard name, a Weighted of arrays on the devices each. They may
        be kept. float(metrics[name].value) waits for the step, so that the devices run idle before
        the next one. Those of the step before are there.
      loop: The training loop.

    Returns:
      END: The state is evaluated if that is due, and saved. A run that continues from it goes on,
      unless `resume` returns END as well. ROLL_BACK, which goes before END: as after a loss spike.
    """

  def on_evaluation(
    self, state: TrainState, step: int, evaluations: Evaluations, summaries: Summaries
  ) -> LoopRequest | None:
    """Called after the evaluation of a step.

    Args:
      state: The state after `step` steps.
      step: Number of steps done.
      evaluations: The metrics of every evaluation input.
      summaries: Prints lines and sends numbers and texts to all writers.

    Returns:
      END: The state is saved, and training ends.
    """

  def on_save(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called when a checkpoint is copied, and is being written in the background.

    This is not called for local states, and not for the state that is saved because of an error.
    """

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called after the last save, at the last step or after END; not after an error or a signal."""

  def close(self) -> None:
    """Called last, also after an error or a signal, to free what the callback holds."""

  def after_training(self, state: TrainState) -> None:
    """Called with the last state when training has ended, and all files of the run are written.

    This is also called if nothing was left to do; not after an error or a signal.
    """
