"""Optimizer and schedule attributes, and the configs they make."""

from typing import Literal

import fiddle as fdl

from paxlite.core.errors import UserError, compiled
from paxlite.core.templates import config
from paxlite.experiments.base import Experiment
from paxlite.optim import optimizers, schedules

Schedule = Literal['constant', 'linear_rampup_cosine_decay', 'linear_rampup_exponential_decay']


_NOT_NEGATIVE = (
  'LEARNING_RATE',
  'WEIGHT_DECAY',
  'ADAM_EPSILON',
  'ADAM_EPSILON_ROOT',
  'LR_COS_WARMUP',
  'LR_LRED_WARMUP',
  'LR_COS_MAX',
  'LR_LRED_MAX',
)


class Optimization(Experiment):
  """Pax's Adam and its learning rate. Defaults are those of Pax's base class."""

  # Optimizer
  LEARNING_RATE: float = 1e-3
  ADAM_BETA1: float = 0.9
  ADAM_BETA2: float = 0.99
  ADAM_EPSILON: float = 1e-6
  ADAM_EPSILON_ROOT: float = 0.0
  ADAM_CLIP_THRESHOLD: float = 1.0
  CLIP_GRADIENT_NORM_TO_VALUE: float = 5.0
  WEIGHT_DECAY: float = 1e-3

  # Schedule
  LR_SCHEDULE: Schedule = 'linear_rampup_exponential_decay'
  LR_COS_WARMUP: int = 4000
  LR_COS_DECAY_END: int = 300_000
  LR_COS_MIN_RATIO: float = 0.1
  LR_COS_MAX: float = 1.0
  LR_LRED_WARMUP: int = 4000
  LR_LRED_DECAY_END: int = 300_000
  LR_LRED_MIN_RATIO: float = 0.1
  LR_LRED_MAX: float = 1.0

  @property
  def TRAINABLE_VARIABLES(self) -> list[str]:
    return ['.*']

  @property
  def LR_COS_DECAY_START(self) -> int:
    return self.LR_COS_WARMUP + 1

  @property
  def LR_LRED_DECAY_START(self) -> int:
    return self.LR_LRED_WARMUP + 1

  def validate(self) -> None:
    super().validate()
    for name in ('ADAM_BETA1', 'ADAM_BETA2'):
      if not 0 <= getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name):g} must be at least 0 and below 1')
    for name in _NOT_NEGATIVE:
      if getattr(self, name) < 0:
        raise UserError(f'{name}={getattr(self, name):g} must not be negative')
    if not self.ADAM_EPSILON and not self.ADAM_EPSILON_ROOT:
      raise UserError(
        'ADAM_EPSILON=0 and ADAM_EPSILON_ROOT=0: the update of a variable without gradient is '
        'not a number; one of them must be positive'
      )
    for name in ('LR_COS_MIN_RATIO', 'LR_LRED_MIN_RATIO'):
      if not 0 <= getattr(self, name) <= 1:
        raise UserError(f'{name}={getattr(self, name):g} must be from 0 to 1')
    for pattern in self.TRAINABLE_VARIABLES:
      compiled(pattern, 'TRAINABLE_VARIABLES')
    if kind := self.schedule_kind:
      warmup, start, end = self._schedule_steps
      if not warmup <= start < end:
        raise UserError(
          f'the schedule needs LR_{kind}_WARMUP={warmup} ≤ '
          f'LR_{kind}_DECAY_START={start} < LR_{kind}_DECAY_END={end}'
        )

  @property
  def schedule_kind(self) -> str:
    """COS or LRED, as the attributes of the schedule are named; '' where it has none."""
    kinds = {'linear_rampup_cosine_decay': 'COS', 'linear_rampup_exponential_decay': 'LRED'}
    return kinds.get(self.LR_SCHEDULE, '')

  @property
  def _schedule_steps(self) -> tuple[int, int, int]:
    """Where the warmup ends, the decay starts and the decay ends."""
    names = ('WARMUP', 'DECAY_START', 'DECAY_END')
    warmup, start, end = (getattr(self, f'LR_{self.schedule_kind}_{name}') for name in names)
    return warmup, start, end

  @property
  def remarks(self) -> list[str]:
    found = list(super().remarks)
    if not self.LEARNING_RATE:
      found.append('LEARNING_RATE=0: no step changes a variable.')
    if kind := self.schedule_kind:
      warmup, start, _ = self._schedule_steps
      if warmup >= self.MAX_STEPS:
        found.append(
          f'MAX_STEPS={self.MAX_STEPS:,} ends within the warmup (LR_{kind}_WARMUP={warmup:,}): '
          'the learning rate never gets to LEARNING_RATE.'
        )
      elif start >= self.MAX_STEPS:
        found.append(
          f'MAX_STEPS={self.MAX_STEPS:,} ends before the learning rate decays '
          f'(LR_{kind}_DECAY_START={start:,}).'
        )
    return found

  def optimizer(self) -> fdl.Config:
    return config(
      optimizers.adam,
      schedule=self.schedule(),
      b1=self.ADAM_BETA1,
      b2=self.ADAM_BETA2,
      epsilon=self.ADAM_EPSILON,
      epsilon_root=self.ADAM_EPSILON_ROOT,
      update_clip=self.ADAM_CLIP_THRESHOLD,
      weight_decay=self.WEIGHT_DECAY,
      clip_gradient_norm=self.CLIP_GRADIENT_NORM_TO_VALUE,
      trainable=list(self.TRAINABLE_VARIABLES),
    )

  def schedule(self) -> fdl.Config:
    if self.LR_SCHEDULE == 'constant':
      return config(schedules.constant, learning_rate=self.LEARNING_RATE)
    get = lambda name: getattr(self, f'LR_{self.schedule_kind}_{name}')
    warmup, start, end = self._schedule_steps
    return config(
      getattr(schedules, self.LR_SCHEDULE),
      learning_rate=self.LEARNING_RATE,
      warmup=warmup,
      decay_start=start,
      decay_end=end,
      min_ratio=get('MIN_RATIO'),
      peak=get('MAX'),
    )
