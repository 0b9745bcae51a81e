"""How long a run trains, and what it reports, evaluates and traces on the way."""

from typing import Annotated, Literal

from paxlite.config.attribute_kinds import Bounds, Count, OffAtZeroInt, Run
from paxlite.experiments.parts.part import Part

_BESIDE = {
  'KEEP_BEST EARLY_STOPPING_PATIENCE': 'BEST_METRIC',
  'PROFILER_CAPTURE_STEP': 'PROFILER_NUM_STEPS',
}


class TrainingLoop(Part, subject='Training loop', beside=_BESIDE):
  """The length of a run, and its intervals, which are in steps."""

  MAX_STEPS: Run[Count] = 1_000_000  # the last step of training
  NUM_EPOCHS: Run[Annotated[float, Bounds('must be above 0', above=0)] | None] = (
    None  # passes over the data, from which a run computes MAX_STEPS when it starts
  )
  SUMMARY_INTERVAL_STEPS: Run[Count] = 100  # steps between two records of training metrics
  EVAL_INTERVAL_STEPS: Run[Count] = 100  # steps between two evaluations
  MAX_EVAL_BATCHES: Run[Count | None] = None  # most batches of an evaluation; None: all
  TRACKERS: Run[list[Literal['wandb', 'mlflow', 'trackio']]] = []  # services that receive metrics
  KEEP_BEST: Run[bool] = False  # keeps the checkpoint of the best evaluation, in best/
  BEST_METRIC: Run[str] = (
    'avg_xent'  # metric of the first evaluation input that decides which checkpoint is best
  )
  EARLY_STOPPING_PATIENCE: Run[OffAtZeroInt] = (
    0  # evaluations without a new best after which training ends; 0: off
  )
  PROFILER_NUM_STEPS: Run[Count] = 2  # steps of a profile
  PROFILER_CAPTURE_STEP: Run[int | None] = None  # step after which a profile begins; None: none
