"""Events of the training loop, and the callbacks of paxlite and of users that receive them."""

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
  """A request that a callback may return to the training loop."""

  END = 'training ends after this step'
  ROLL_BACK = 'the run continues from the last good checkpoint before this step'

  @classmethod
  def of(cls, answers: Iterable[object]) -> 'LoopRequest | None':
    """Combines the requests of several callbacks: a rollback takes precedence over an end."""
    found = [answer for answer in answers if isinstance(answer, LoopRequest)]
    return cls.ROLL_BACK if cls.ROLL_BACK in found else next(iter(found), None)


@dataclasses.dataclass(frozen=True)
class Loop:
  """The interface of the training loop for callbacks."""

  summaries: Summaries  # prints lines and sends numbers and texts to all writers
  # paused(state, kind) is a context manager that first waits for the devices, and counts its time
  # as `kind`, one of goodput.KINDS, instead of as training
  paused: Callable[[TrainState, str], contextlib.AbstractContextManager[None]]
  # metadata(step) starts to collect the metadata of a checkpoint of the step, and returns a
  # function that waits for the result. Every process must call it.
  metadata: Callable[[int], Callable[[], JsonObject]]


class Callback:
  """Receives events of the training loop; subclasses override the methods that they need.

  An experiment returns its callbacks from `callbacks()`. At each event, callbacks run in this
  order: loss spikes, the best checkpoint, those of `callbacks()`, the profiler, those of
  extensions. A nonzero `rank` moves a class before or after all of these: data records and local
  states have -1, samples have 1.

  Every process calls the callbacks and must get the same requests from them. An exception ends the
  run, and the message names the line that raised it. A run of one process saves its state first,
  except in `resume`, in `on_start`, and in the events after a save.

  `state` is the state after `step` steps. Do not keep it: the next step overwrites it.
  """

  END = LoopRequest.END
  ROLL_BACK = LoopRequest.ROLL_BACK
  rank = 0  # callbacks are called by ascending ranks

  def start_lines(self) -> Sequence[str]:
    """Returns lines to print when training starts."""
    return ()

  def resume(self, step: int) -> LoopRequest | None:
    """Called with the step that a run continues from, 0 at first; may be called twice for a step.

    Returns:
      END if the run already ended there, so nothing is left to do.
    """

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called before the first step after a start, and again after a rollback to `step`."""

  def before_step(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called before the next batch is drawn, after the evaluation and save of `step`."""

  def after_step(
    self, state: TrainState, step: int, metrics: Metrics, loop: Loop
  ) -> LoopRequest | None:
    """Called when a step is dispatched; the devices may still be computing it.

    Args:
      state: The state after the step.
      step: Number of steps done, including this one.
      metrics: The step's metrics by TensorBoard name, each a Weighted of arrays on the devices.
        They may be kept. float(metrics[name].value) waits for the step, which leaves the devices
        idle before the next one; metrics of the previous step are ready.
      loop: The training loop.

    Returns:
      END: Evaluates the state if due, saves it, and ends training. A run that continues from it
      trains on unless `resume` returns END too. ROLL_BACK, which takes precedence over END: rolls
      the run back as after a loss spike.
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
      END: Saves the state and ends training.
    """

  def on_save(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called when a checkpoint has been copied and is being written in the background.

    Not called for local checkpoints, nor for a state saved because of an error.
    """

  def on_end(self, state: TrainState, step: int, loop: Loop) -> None:
    """Called after the last save, at the last step or after END; not after an error or a signal."""

  def close(self) -> None:
    """Called last, also after an error or signal, to free resources."""

  def after_training(self, state: TrainState) -> None:
    """Called with the last state when training has ended and all files of the run are written.

    Also called if nothing was left to do; not called after an error or signal.
    """
