"""How long a run trains, on batches of which size, and what it reports on the way."""

import math
from typing import Annotated, Literal

from paxlite.config.attribute_kinds import (
  Bounds,
  Count,
  NotNegativeInt,
  OffAtZero,
  OffAtZeroInt,
  Run,
  Training,
  Uint32,
  at_most,
)
from paxlite.core.errors import UserError
from paxlite.experiments.parts.parallelism import Parallelism
from paxlite.parallel import partitioning

_BESIDE = {
  'KEEP_BEST EARLY_STOPPING_PATIENCE': 'BEST_METRIC',
  'PROFILER_CAPTURE_STEP': 'PROFILER_NUM_STEPS',
  'LOSS_SPIKE_FACTOR': 'LOSS_SPIKE_WINDOW MAX_ROLLBACKS',
}


class TrainingLoop(Parallelism, subject='Training loop', beside=_BESIDE):
  """The length of a run, its batches, its intervals, which are in steps, and when it is ended.

  docs/reliability.md tells of hangs, loss spikes and updates that are not finite.
  The global batch is PERCORE_BATCH_SIZE × devices, for every mesh. Fractions are allowed.
  """

  MAX_STEPS: Run[Count] = 1_000_000  # last training step
  NUM_EPOCHS: Run[Annotated[float, Bounds('must be above 0', above=0)] | None] = (
    None  # passes over the data; a run computes MAX_STEPS from it at its start
  )
  SUMMARY_INTERVAL_STEPS: Run[Count] = 100  # steps between records of training metrics
  EVAL_INTERVAL_STEPS: Run[Count] = 100  # steps between evaluations
  MAX_EVAL_BATCHES: Run[Count | None] = None  # maximum batches per evaluation; None: all
  TRACKERS: Run[list[Literal['wandb', 'mlflow', 'trackio']]] = []  # services that receive metrics
  KEEP_BEST: Run[bool] = False  # keeps the best evaluation's checkpoint in best/
  BEST_METRIC: Run[str] = (
    'avg_xent'  # metric of the first evaluation input that selects the best checkpoint
  )
  EARLY_STOPPING_PATIENCE: Run[OffAtZeroInt] = (
    0  # evaluations without a new best before training ends; 0: off
  )
  PROFILER_NUM_STEPS: Run[Count] = 2  # steps per profile
  PROFILER_CAPTURE_STEP: Run[int | None] = None  # step after which a profile begins; None: none
  # At most 1000: streams remember their positions before the last 1024 steps (data/base.py).
  MAX_SKIPPED_STEPS: Run[Annotated[Count, at_most(1000)]] = (
    100  # consecutive skipped updates that end a run
  )
  STEP_TIMEOUT: Run[OffAtZero] = (
    1800.0  # seconds without a step before a run writes stacks and ends; 0: unlimited
  )
  PHASE_TIMEOUT: Run[OffAtZero] = (
    14400.0  # maximum seconds for starting, restoring, compiling and the last save; 0: unlimited
  )
  STACK_TRACE_INTERVAL: Run[OffAtZero] = (
    0.0  # seconds between stack traces, even without a hang; 0: none
  )
  LOSS_SPIKE_FACTOR: Run[OffAtZero] = (
    0.0  # multiple of the recent mean loss that triggers a rollback; 0: off
  )
  LOSS_SPIKE_WINDOW: Run[Annotated[Count, at_most(1e6)]] = (
    100  # steps in the mean for LOSS_SPIKE_FACTOR
  )
  MAX_ROLLBACKS: Run[NotNegativeInt] = 3  # rollbacks after which the next loss spike ends a run
  PERCORE_BATCH_SIZE: Run[float] = 1.0  # sequences per device in a batch
  MAX_SEQ_LEN: Training[Count] = 1024  # tokens per sequence
  PACKED_INPUT: Training[bool] = True  # packs segments into a sequence; none attends to another
  NUM_MICROBATCHES: Run[Count] = 1  # parts of a batch with accumulated gradients
  ROWS_PER_EXAMPLE: Training[Count] = 1  # sequences per example, such as a pair
  SEED: Training[Uint32] = 1234  # seed of initial values, dropout and data order

  @property
  def packed(self) -> bool:
    """Whether a row of the data may hold several documents."""
    return self.PACKED_INPUT

  @property
  def batch_shards(self) -> int:
    """The number of parts that the rows of a batch are split into."""
    return partitioning.num_shards(self.mesh_sizes, self.rules, 'batch')

  @property
  def batch_size(self) -> int:
    """The number of rows in a global batch."""
    exact = self.PERCORE_BATCH_SIZE * self.num_devices
    return round(exact) if math.isfinite(exact) else 0

  def validate(self) -> None:
    super().validate()
    length_shards = partitioning.num_shards(self.mesh_sizes, self.rules, 'residual_length')
    if self.MAX_SEQ_LEN % length_shards:
      axes = ' × '.join(partitioning.axes_of(self.rules['residual_length']))
      raise UserError(
        f'MAX_SEQ_LEN={self.MAX_SEQ_LEN} is not divisible by {axes} = {length_shards}'
      )
    self.check_batch_size()
    if self.LOSS_SPIKE_FACTOR and self.LOSS_SPIKE_FACTOR <= 1:
      raise UserError(
        f'LOSS_SPIKE_FACTOR={self.LOSS_SPIKE_FACTOR:g} must be above 1, or 0 for none'
      )

  def check_batch_size(self) -> None:
    """Raises UserError if the global batch is not a whole number or cannot be split."""
    exact, batch = self.PERCORE_BATCH_SIZE * self.num_devices, self.batch_size
    where = f'PERCORE_BATCH_SIZE={self.PERCORE_BATCH_SIZE:g} × {self.num_devices} devices'
    if batch < 1 or abs(batch - exact) > 1e-6:
      raise UserError(f'{where} is a global batch of {exact:g}: it must be a whole number ≥ 1')
    shards = self.batch_shards
    parts = {n: getattr(self, n) for n in ('NUM_MICROBATCHES', 'ROWS_PER_EXAMPLE')}
    if batch % (shards * math.prod(parts.values())):
      micro = ''.join(f' × {name}={n}' for name, n in parts.items() if n != 1)
      axes = ' × '.join(partitioning.axes_of(self.rules['batch']))
      raise UserError(
        f'{where} is a global batch of {batch}, not divisible by {axes} = {shards}{micro}'
      )
