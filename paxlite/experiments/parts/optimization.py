"""Attributes of the optimizer and the schedule, and the configs that they make."""

import copy
import dataclasses
import re
from typing import Literal

import fiddle as fdl

from paxlite import extensions
from paxlite.config.attribute_kinds import (
  Below1,
  Count,
  Fraction,
  NotNegative,
  NotNegativeInt,
  Run,
  Training,
  kind_of,
)
from paxlite.config.attributes import derived
from paxlite.config.templates import config, config_text, nodes
from paxlite.core.errors import UserError, compiled
from paxlite.experiments.parts.memory_savings import MemorySavings
from paxlite.optim import by_name, schedules, variable_groups
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.schedules import DecayShape

Schedule = Literal[
  'constant',
  'linear',
  'warmup_stable_decay',
  'inverse_sqrt',
  'linear_rampup_cosine_decay',
  'linear_rampup_exponential_decay',
]

_of_pax = lambda kind: {
  **{n: f'LR_{kind}_{n.upper()}' for n in ('warmup', 'decay_start', 'decay_end', 'min_ratio')},
  'peak': f'LR_{kind}_MAX',
}
# The arguments of each schedule, and the attributes that they are.
_SCHEDULES: dict[Schedule, dict[str, str]] = {
  'constant': {},
  'inverse_sqrt': {'warmup': 'LR_WARMUP'},
  'linear': {'warmup': 'LR_WARMUP', 'min_ratio': 'LR_MIN_RATIO'},
  'warmup_stable_decay': {
    'warmup': 'LR_WARMUP', 'decay_steps': 'LR_DECAY_STEPS', 'decay_ends': 'LR_DECAY_ENDS',
    'min_ratio': 'LR_MIN_RATIO', 'shape': 'LR_DECAY_SHAPE',
  },
  'linear_rampup_cosine_decay': _of_pax('COS'),
  'linear_rampup_exponential_decay': _of_pax('LRED'),
}  # fmt: skip

_OF_SCHEDULES = {name for names in _SCHEDULES.values() for name in names.values()}
extensions.added('optimizers')  # which registers them
_FIELDS = {name: dataclasses.fields(named.fields) for name, named in by_name.NAMED.items()}
_OF_OPTIMIZERS = {f.name.upper() for fields in _FIELDS.values() for f in fields if kind_of(f.type)}
# attributes that hold for any transformation
_ALWAYS_HELD = {
  'TRAINABLE_VARIABLES', 'CLIP_GRADIENT_NORM_TO_VALUE', 'LEARNING_RATE_FACTORS', 'EMA_DECAY',
}  # fmt: skip


class Optimization(
  MemorySavings,
  subject='Optimizer and learning rate',
  fields=[named.fields for named in by_name.NAMED.values()],
):
  """An optimizer and its learning-rate schedule, with the defaults of Pax's base class.

  Attributes of one optimizer alone are fields of its class in optim/by_name.py.
  """

  OPTIMIZER: Training[str] = 'adam'  # optimizer: adam (Pax's), adamw, muon, lion, …
  LEARNING_RATE: Training[NotNegative] = 1e-3  # base learning rate, multiplied by the schedule
  ADAM_BETA1: Training[Below1] = 0.9  # decay rate of the mean gradient (first moment)
  ADAM_BETA2: Training[Below1] = 0.99  # decay rate of the mean squared gradient (second moment)
  ADAM_EPSILON: Training[NotNegative] = 1e-6  # ε outside the root of the second moment
  ADAM_EPSILON_ROOT: Training[NotNegative] = 0.0  # ε inside the root of the second moment
  CLIP_GRADIENT_NORM_TO_VALUE: Training[float] = 5.0  # maximum global gradient norm; ≤ 0: off
  WEIGHT_DECAY: Training[NotNegative] = 1e-3  # decoupled weight decay, times the learning rate

  EMA_DECAY: Training[Below1] = (
    0.0  # decay rate of averaged weights for evaluation and export; 0: none
  )

  LR_SCHEDULE: Training[Schedule] = 'linear_rampup_exponential_decay'  # learning-rate schedule
  LR_WARMUP: Training[NotNegativeInt] = (
    0  # warmup steps (linear, warmup_stable_decay, inverse_sqrt)
  )
  LR_DECAY_SHAPE: Run[DecayShape] = 'linear'  # decay curve of warmup_stable_decay
  LR_MIN_RATIO: Run[Fraction] = 0.0  # final share of LEARNING_RATE (linear, warmup_stable_decay)
  LR_COS_WARMUP: Training[NotNegativeInt] = 4000  # warmup steps of the cosine schedule
  LR_COS_DECAY_END: Training[int] = 300_000  # step where cosine decay ends
  LR_COS_MIN_RATIO: Training[Fraction] = 0.1  # final share of the cosine schedule's peak
  LR_COS_MAX: Training[NotNegative] = 1.0  # peak of the cosine schedule, times LEARNING_RATE
  LR_LRED_WARMUP: Training[NotNegativeInt] = 4000  # warmup steps of the exponential schedule
  LR_LRED_DECAY_END: Training[int] = 300_000  # step where exponential decay ends
  LR_LRED_MIN_RATIO: Training[Fraction] = 0.1  # final share of the exponential schedule's peak
  LR_LRED_MAX: Training[NotNegative] = 1.0  # peak of the exponential schedule, times LEARNING_RATE

  @property
  def LEARNING_RATE_FACTORS(self) -> Training[list[str]]:
    """Learning-rate factors, 'PATTERN=FACTOR'; a variable takes its first match."""
    return []

  @property
  def WEIGHT_DECAY_FACTORS(self) -> Training[list[str]]:
    """Weight-decay factors by variable, 'PATTERN=FACTOR', as '.*/b=0'."""
    return []

  @property
  def LR_DECAY_ENDS(self) -> Run[list[int]]:
    """Steps where decays end: one for linear, one or more for warmup_stable_decay."""
    return [self.MAX_STEPS]

  @property
  def LR_DECAY_STEPS(self) -> Run[Count]:
    """Steps per decay of warmup_stable_decay."""
    return max(1, self.MAX_STEPS // 5)

  @property
  def TRAINABLE_VARIABLES(self) -> Training[list[str]]:
    """Regular expressions of trained variables; others are frozen."""
    if not self.USE_LORA:
      return ['.*']
    return self.factor_variables

  @property
  def LR_COS_DECAY_START(self) -> Training[int]:
    """Step where cosine decay starts."""
    return self.LR_COS_WARMUP + 1

  @property
  def LR_LRED_DECAY_START(self) -> Training[int]:
    """Step where exponential decay starts."""
    return self.LR_LRED_WARMUP + 1

  def validate(self) -> None:
    self._check_decays()
    super().validate()
    self.transformation()  # refuses what no optimizer can be made of
    if not self.ADAM_EPSILON and not self.ADAM_EPSILON_ROOT and self._decides('ADAM_EPSILON'):
      raise UserError(
        'ADAM_EPSILON=0 and ADAM_EPSILON_ROOT=0: the update of a variable without gradient is '
        'not a number; one of them must be positive'
      )
    if self.LEARNING_RATE_FACTORS and self.OPTIMIZER == 'schedule_free':
      raise UserError(
        'LEARNING_RATE_FACTORS: not supported with schedule_free, which averages variables at its '
        'own rate: choose another OPTIMIZER'
      )
    for pattern in self.TRAINABLE_VARIABLES:
      compiled(pattern, 'TRAINABLE_VARIABLES')
    for name in ('LEARNING_RATE_FACTORS', 'WEIGHT_DECAY_FACTORS'):
      variable_groups.parsed(getattr(self, name), name)
    if kind := self.schedule_kind:
      warmup, start, end = self._schedule_steps
      if not warmup <= start < end:
        raise UserError(
          f'the schedule needs LR_{kind}_WARMUP={warmup} ≤ '
          f'LR_{kind}_DECAY_START={start} < LR_{kind}_DECAY_END={end}'
        )

  def _check_decays(self) -> None:
    """Raises UserError if the steps of a schedule that is not Pax's are in no order."""
    name, warmup, ends = self.LR_SCHEDULE, self.LR_WARMUP, self.LR_DECAY_ENDS
    if name == 'inverse_sqrt' and not warmup:
      raise UserError('LR_SCHEDULE=inverse_sqrt needs LR_WARMUP of at least 1')
    if name == 'linear' and not (len(ends) == 1 and warmup < ends[0]):
      raise UserError(
        f'LR_SCHEDULE=linear needs one step in LR_DECAY_ENDS={ends}, after LR_WARMUP={warmup}'
      )
    if name == 'warmup_stable_decay':
      before = [warmup, *ends[:-1]]
      late_enough = [b + self.LR_DECAY_STEPS <= e for b, e in zip(before, ends, strict=False)]
      if not ends or not all(late_enough):
        raise UserError(
          f'LR_SCHEDULE=warmup_stable_decay: each of LR_DECAY_ENDS={ends} must be at least '
          f'LR_DECAY_STEPS={self.LR_DECAY_STEPS} after the one before it, and the first one after '
          f'LR_WARMUP={warmup}'
        )

  @property
  def trains_all(self) -> bool:
    """Whether no variable is frozen."""
    return '.*' in self.TRAINABLE_VARIABLES and not self.reference_path

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
  def warnings(self) -> list[str]:
    found = list(super().warnings)
    if not self.LEARNING_RATE:
      found.append('LEARNING_RATE=0: no step changes a variable.')
    if self.FROZEN_DTYPE != 'float32' and self.trains_all:
      found.append(f'FROZEN_DTYPE={self.FROZEN_DTYPE}: no variable is frozen.')
    if unread := self.unread_by_optimizer:
      found.append(
        f'{", ".join(unread)}: the optimizer of {type(self).__name__} does not read '
        f'{"it, and it has" if len(unread) == 1 else "them, and they have"} no effect.'
      )
    if not self._has_schedule(self.transformation()):
      return found
    ramps = self.LR_SCHEDULE in ('linear', 'warmup_stable_decay', 'inverse_sqrt')
    if ramps and self.LR_WARMUP >= self.MAX_STEPS:
      found.append(
        f'MAX_STEPS={self.MAX_STEPS:,} ends within the warmup (LR_WARMUP={self.LR_WARMUP:,}): the '
        'learning rate never reaches LEARNING_RATE.'
      )
    decays = self.LR_SCHEDULE in ('linear', 'warmup_stable_decay')
    if decays and self.LR_DECAY_ENDS[-1] < self.MAX_STEPS:
      found.append(
        f'LR_DECAY_ENDS={self.LR_DECAY_ENDS} end before MAX_STEPS={self.MAX_STEPS:,}: all steps '
        f'after them have {self.LR_MIN_RATIO:g} × LEARNING_RATE.'
      )
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

  def check_optimizer(self, task: fdl.Config) -> None:
    """Raises UserError if the config of a task has another optimizer than that of optimizer()."""
    if _text(task.optimizer) != _text(self.optimizer()):
      raise UserError(
        f'{type(self).__qualname__}.task() changes the optimizer of the task: override '
        'transformation() instead, and set attributes such as CLIP_GRADIENT_NORM_TO_VALUE'
      )

  def _has_schedule(self, transformation: fdl.Config) -> bool:
    """Whether a transformation has the learning rate of schedule()."""
    schedule = _text(self.schedule())
    return any(n.is_config and _text(n.value) == schedule for n in nodes(transformation))

  def _known_schedule(self, transformation: fdl.Config) -> fdl.Config | None:
    """Returns the schedule that a transformation has; None if it has none of the attributes."""
    if self._has_schedule(transformation):
      return self.schedule()
    if self._decides('LEARNING_RATE'):
      return config(schedules.constant, learning_rate=self.LEARNING_RATE)
    return None

  def _decides(self, name: str) -> bool:
    """Whether transformation() returns something else for another value of an attribute."""
    other = copy.copy(self)
    value = getattr(self, name)
    changed = value + 1 if isinstance(value, int | float) else ['.*=2'] if value == [] else None
    vars(other)[name] = not value if isinstance(value, bool) else changed
    try:
      return _text(other.transformation()) != _text(self.transformation())
    except Exception:  # it has read the value, which is none
      return True

  @property
  def _idle(self) -> set[str]:
    own = type(self)
    if (own.transformation, own.schedule) != (Optimization.transformation, Optimization.schedule):
      return super()._idle  # what they read is not known
    read = {field.name.upper() for field in _FIELDS.get(self.OPTIMIZER, ())}
    of_schedule = {*_SCHEDULES[self.LR_SCHEDULE].values()}
    if self.LR_SCHEDULE == 'linear':
      of_schedule.add('LR_DECAY_ENDS')
    others = _OF_OPTIMIZERS - read if self.OPTIMIZER in _FIELDS else set()
    return super()._idle | others | _OF_SCHEDULES - of_schedule

  @property
  def unread_attributes(self) -> set[str]:
    names = {name for name in vars(Optimization) if name.isupper()} - _ALWAYS_HELD
    return {name for name in names if not self._decides(name)}

  @property
  def unread_by_optimizer(self) -> list[str]:
    """Attributes of the optimizer that the optimizer does not read, and that somebody has set."""
    unread = sorted(self.unread_attributes)
    if type(self).transformation is Optimization.transformation:
      return [name for name in unread if self.is_stated_by_user(name)]
    default = lambda name: vars(Optimization)[name]
    return [
      name
      for name in unread
      if self.is_stated_by_user(name)
      or not (isinstance(default(name), derived) or getattr(self, name) == default(name))
    ]

  def transformation(self) -> fdl.Config:
    """Returns the config of an optax transformation, here that of OPTIMIZER.

    A subclass may override it. All else that concerns an optimizer holds for any transformation.
    """
    named, values = by_name.find(self.OPTIMIZER), {}
    for field in dataclasses.fields(named.fields):
      name = field.name.upper()
      if hasattr(type(self), name):
        values[field.name] = getattr(self, name)
      elif field.default is dataclasses.MISSING:
        raise UserError(
          f'OPTIMIZER={self.OPTIMIZER} needs the attribute {name}, which '
          f'{type(self).__qualname__} does not declare'
        )
    return config(named.make, schedule=self.schedule(), **values)

  def optimizer(self) -> fdl.Config:
    """Returns the config of the Optimizer, in which the attributes hold for any transformation."""
    transformation = self.transformation()
    return config(
      Optimizer, transformation=transformation, schedule=self._known_schedule(transformation),
      trainable=tuple(self.TRAINABLE_VARIABLES), rate_factors=tuple(self.LEARNING_RATE_FACTORS),
      clip_gradient_norm=self.CLIP_GRADIENT_NORM_TO_VALUE, on_host=self.OFFLOAD_OPTIMIZER,
      moments_dtype=self.ADAM_MOMENTS_DTYPE, average_decay=self.EMA_DECAY,
      by_layer=by_name.is_by_layer(fdl.get_callable(transformation)),
    )  # fmt: skip

  def schedule(self) -> fdl.Config:
    """Returns the config of the learning rate by update count."""
    values = {n: getattr(self, name) for n, name in _SCHEDULES[self.LR_SCHEDULE].items()}
    if self.LR_SCHEDULE == 'linear':
      values['decay_end'] = self.LR_DECAY_ENDS[-1]
    made = getattr(schedules, self.LR_SCHEDULE)
    return config(made, learning_rate=self.LEARNING_RATE, **values)


def _text(cfg: fdl.Config) -> str:
  """Returns a config as text, without the addresses of functions that a method makes anew."""
  return re.sub(' at 0x[0-9a-f]+', '', config_text(cfg))
