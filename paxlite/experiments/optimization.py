"""Optimizer and schedule attributes, and the configs they make."""

from typing import Literal

import fiddle as fdl

from paxlite import optimizers, schedules
from paxlite.errors import UserError, compiled
from paxlite.experiment import Experiment
from paxlite.templates import config

Schedule = Literal['constant', 'linear_rampup_cosine_decay', 'linear_rampup_exponential_decay']


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
    for pattern in self.TRAINABLE_VARIABLES:
      compiled(pattern, 'TRAINABLE_VARIABLES')
    for kind in ('COS', 'LRED'):
      start, end = getattr(self, f'LR_{kind}_DECAY_START'), getattr(self, f'LR_{kind}_DECAY_END')
      used = self.LR_SCHEDULE.startswith('linear') and ('cosine' in self.LR_SCHEDULE) == (
        kind == 'COS'
      )
      if used and not getattr(self, f'LR_{kind}_WARMUP') <= start < end:
        raise UserError(
          f'the schedule needs LR_{kind}_WARMUP={getattr(self, f"LR_{kind}_WARMUP")} ≤ '
          f'LR_{kind}_DECAY_START={start} < LR_{kind}_DECAY_END={end}'
        )

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
    cosine = self.LR_SCHEDULE == 'linear_rampup_cosine_decay'
    get = lambda name: getattr(self, f'LR_{"COS" if cosine else "LRED"}_{name}')
    return config(
      schedules.linear_rampup_cosine_decay if cosine else schedules.linear_rampup_exponential_decay,
      learning_rate=self.LEARNING_RATE,
      warmup=get('WARMUP'),
      decay_start=get('DECAY_START'),
      decay_end=get('DECAY_END'),
      min_ratio=get('MIN_RATIO'),
      peak=get('MAX'),
    )
