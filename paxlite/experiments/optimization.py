"""Attributes of the optimizer and the schedule, and the configs that they make."""

from typing import Literal

import fiddle as fdl

from paxlite.core.attribute_kinds import Below1, Fraction, NotNegative, NotNegativeInt, Training
from paxlite.core.attribute_reads import reads_of
from paxlite.core.attributes import derived
from paxlite.core.errors import UserError, compiled
from paxlite.core.templates import config
from paxlite.experiments.memory_savings import MemorySavings
from paxlite.optim import optimizers, own_optimizer, schedules

Schedule = Literal['constant', 'linear_rampup_cosine_decay', 'linear_rampup_exponential_decay']

# attributes that hold for any optimizer, because it is completed by them
_ALWAYS_HELD = {'TRAINABLE_VARIABLES', 'CLIP_GRADIENT_NORM_TO_VALUE'}


class Optimization(MemorySavings):
  """Pax's Adam and its learning rate schedule. The defaults are those of Pax's base class."""

  # Optimizer
  LEARNING_RATE: Training[NotNegative] = 1e-3  # its schedule is multiplied by this
  ADAM_BETA1: Training[Below1] = 0.9  # decay of the mean gradient
  ADAM_BETA2: Training[Below1] = 0.99  # decay of the mean squared gradient
  ADAM_EPSILON: Training[NotNegative] = 1e-6  # added to the root of the mean squared gradient
  ADAM_EPSILON_ROOT: Training[NotNegative] = 0.0  # added below that root
  ADAM_CLIP_THRESHOLD: Training[float] = 1.0  # largest RMS of a variable's update; ≤ 0: off
  CLIP_GRADIENT_NORM_TO_VALUE: Training[float] = 5.0  # largest norm of all gradients; ≤ 0: off
  WEIGHT_DECAY: Training[NotNegative] = 1e-3  # decoupled, times the learning rate

  # Schedule
  LR_SCHEDULE: Training[Schedule] = 'linear_rampup_exponential_decay'  # of the learning rate
  LR_COS_WARMUP: Training[NotNegativeInt] = 4000  # steps of the rise, for the cosine schedule
  LR_COS_DECAY_END: Training[int] = 300_000  # step at which the fall ends
  LR_COS_MIN_RATIO: Training[Fraction] = 0.1  # last value in multiples of the largest
  LR_COS_MAX: Training[NotNegative] = 1.0  # largest value, times LEARNING_RATE
  LR_LRED_WARMUP: Training[NotNegativeInt] = 4000  # steps of the rise, for the exponential schedule
  LR_LRED_DECAY_END: Training[int] = 300_000  # step at which the fall ends
  LR_LRED_MIN_RATIO: Training[Fraction] = 0.1  # last value in multiples of the largest
  LR_LRED_MAX: Training[NotNegative] = 1.0  # largest value, times LEARNING_RATE

  @property
  def TRAINABLE_VARIABLES(self) -> Training[list[str]]:
    """Regular expressions; variables whose whole names match one of them are trained."""
    return ['.*']

  @property
  def LR_COS_DECAY_START(self) -> Training[int]:
    """The step at which the cosine schedule begins to fall."""
    return self.LR_COS_WARMUP + 1

  @property
  def LR_LRED_DECAY_START(self) -> Training[int]:
    """The step at which the exponential schedule begins to fall."""
    return self.LR_LRED_WARMUP + 1

  def validate(self) -> None:
    super().validate()
    if not self.ADAM_EPSILON and not self.ADAM_EPSILON_ROOT:
      raise UserError(
        'ADAM_EPSILON=0 and ADAM_EPSILON_ROOT=0: the update of a variable without gradient is '
        'not a number; one of them must be positive'
      )
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
    """COS or LRED, the word in the names of the schedule's attributes; '' for a constant rate."""
    kinds = {'linear_rampup_cosine_decay': 'COS', 'linear_rampup_exponential_decay': 'LRED'}
    return kinds.get(self.LR_SCHEDULE, '')

  @property
  def _schedule_steps(self) -> tuple[int, int, int]:
    """The steps at which the warmup ends, the decay starts and the decay ends."""
    names = ('WARMUP', 'DECAY_START', 'DECAY_END')
    warmup, start, end = (getattr(self, f'LR_{self.schedule_kind}_{name}') for name in names)
    return warmup, start, end

  @property
  def remarks(self) -> list[str]:
    found = list(super().remarks)
    if not self.LEARNING_RATE:
      found.append('LEARNING_RATE=0: no step changes a variable.')
    if self.FROZEN_DTYPE != 'float32' and '.*' in self.TRAINABLE_VARIABLES:
      found.append(
        f'FROZEN_DTYPE={self.FROZEN_DTYPE}: all variables are trained, and none is frozen.'
      )
    if unread := self.unread_by_optimizer:
      found.append(
        f'{", ".join(unread)}: the optimizer of {type(self).__name__} does not read '
        f'{"it, and it has" if len(unread) == 1 else "them, and they have"} no effect.'
      )
    if 'schedule' not in self._read_by_optimizer:
      return found
    if (kind := self.schedule_kind) and not self._is_as_published(kind):
      warmup, start, _ = self._schedule_steps
      if warmup >= self.MAX_STEPS:
        found.append(
          f'MAX_STEPS={self.MAX_STEPS:,} ends within the warmup (LR_{kind}_WARMUP={warmup:,}): '
          'the learning rate never reaches LEARNING_RATE.'
        )
      elif start >= self.MAX_STEPS:
        found.append(
          f'MAX_STEPS={self.MAX_STEPS:,} ends before the learning rate decays '
          f'(LR_{kind}_DECAY_START={start:,}).'
        )
    return found

  def _is_as_published(self, kind: str) -> bool:
    """Whether this is an experiment of paxlite with its own steps: a user has chosen none of them.

    Pax's synthetic experiments, which measure speed, end within their warmup.
    """
    names = ('MAX_STEPS', 'NUM_EPOCHS', 'LR_SCHEDULE', f'LR_{kind}_WARMUP')
    cls = type(self)
    return cls.__module__.startswith('paxlite.') and all(
      getattr(self, name) == getattr(cls, name) for name in names
    )

  def complete_optimizer(self, task: fdl.Config) -> None:
    own = task.optimizer
    held: dict[str, object] = dict(
      trainable=list(self.TRAINABLE_VARIABLES),
      clip_gradient_norm=self.CLIP_GRADIENT_NORM_TO_VALUE,
      moments_dtype=self.ADAM_MOMENTS_DTYPE,
      on_host=self.OFFLOAD_OPTIMIZER,
    )
    if fdl.get_callable(own) is optimizers.adam:
      for name in held.keys() - own.__arguments__.keys():
        setattr(own, name, held[name])
    if fdl.get_callable(own) is not optimizers.adam or held != {k: getattr(own, k) for k in held}:
      experiment = f'{type(self).__module__}.{type(self).__qualname__}'
      # task() may put in another optimizer than that of optimizer(), whose rate is not known
      is_that = fdl.get_callable(own) is fdl.get_callable(self.optimizer())
      known = self._schedule_of_own_optimizer() if is_that else None
      task.optimizer = config(
        own_optimizer.completed, optimizer=own, experiment=experiment, schedule=known, **held
      )

  def _schedule_of_own_optimizer(self) -> fdl.Config | None:
    """Returns the schedule that optimizer() has read; None if it has read none."""
    read = self._read_by_optimizer
    if 'schedule' in read:
      return self.schedule()
    if 'LEARNING_RATE' in read:
      return config(schedules.constant, learning_rate=self.LEARNING_RATE)
    return None

  @property
  def _read_by_optimizer(self) -> set[str]:
    """The attributes and methods that optimizer() reads."""
    return reads_of(self, lambda e: e.optimizer())

  @property
  def unread_by_optimizer(self) -> list[str]:
    """Attributes of the optimizer that the optimizer does not read, and that somebody has set."""
    own = {name for name in vars(Optimization) if name.isupper()} - _ALWAYS_HELD
    unread = own - self._read_by_optimizer
    if type(self).optimizer is Optimization.optimizer:
      return [name for name in sorted(unread) if self.is_stated_by_user(name)]
    default = lambda name: vars(Optimization)[name]
    return [
      name
      for name in sorted(unread)
      if self.is_stated_by_user(name)
      or not (isinstance(default(name), derived) or getattr(self, name) == default(name))
    ]

  def optimizer(self) -> fdl.Config:
    """Returns the config of an Optimizer, or of an optax transformation.

    A subclass may override it. Trainable variables, clipping, the dtype and the place of moments,
    and skipped steps hold for any optimizer: see own_optimizer.
    """
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
      moments_dtype=self.ADAM_MOMENTS_DTYPE,
      on_host=self.OFFLOAD_OPTIMIZER,
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
