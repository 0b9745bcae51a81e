"""Optimizers by name, for the attribute OPTIMIZER.

Each is a dataclass. Its fields are attributes of the experiment in small letters, so that they say
which attributes have a meaning for the optimizer, and `transformation` makes an optax
transformation of them. `schedule` is the learning rate by update count.

    @register('momentum')
    class momentum:
      adam_beta1: float

      def transformation(self, schedule):
        return optax.sgd(schedule, self.adam_beta1)

Configs name the function that `register` puts in the place of the class: momentum(schedule,
adam_beta1). A field of paxlite's that has a kind declares its attribute, and those of several
optimizers are declared in experiments/parts/optimization.py. What holds for every optimizer, such
as clipping, is in optimizers.Optimizer.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, dataclass_transform

import optax

from paxlite import extensions
from paxlite.cli.user_code import place_of
from paxlite.config.attribute_kinds import Below1, NotNegative, Training
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean
from paxlite.optim.muon import scale_by_muon
from paxlite.optim.transformations import Skippable, scale_by_learning_rate, scale_by_pax_adam
from paxlite.optim.variable_groups import decayed

Make = Callable[..., optax.GradientTransformation]


class Named(NamedTuple):
  """An optimizer that has a name."""

  make: Make  # the function of the schedule and of the fields
  fields: Any  # the dataclass
  by_layer: bool  # whether each number is updated by itself

  @property
  def place(self) -> str:
    code = inspect.unwrap(self.make)
    return place_of(getattr(code, 'transformation', code))


NAMED: dict[str, Named] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def register(name: str, by_layer: bool = False) -> Callable[[Any], Any]:
  """Returns a decorator that makes OPTIMIZER=name an optimizer, once its module is imported.

  Args:
    name: The name; UserError if another optimizer has it.
    by_layer: Whether each number is updated by itself, so that with OFFLOAD_OPTIMIZER the layers of
      a repeated stack are fetched and updated one by one: see moments.streamed.
  """

  def add(cls: Any) -> Make:
    new = Named(*(_of_class(cls) if isinstance(cls, type) else _of_function(name, cls)), by_layer)
    if NAMED.get(name, new).place != new.place:  # a module may be imported again
      raise UserError(f'{new.place}: the optimizer {name!r} is registered already')
    NAMED[name] = new
    return new.make

  return add


def _of_class(cls: type) -> tuple[Make, type]:
  if not hasattr(cls, 'transformation'):
    raise UserError(f'{cls.__qualname__} needs a method transformation(schedule)')
  fields: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)

  @functools.wraps(cls, updated=())
  def make(schedule: optax.Schedule, **values: Any) -> optax.GradientTransformation:
    return fields(**values).transformation(schedule)

  schedule = inspect.Parameter('schedule', inspect.Parameter.POSITIONAL_OR_KEYWORD)
  values = inspect.signature(fields).parameters.values()
  make.__signature__ = inspect.Signature([schedule, *values])  # type: ignore[attr-defined]
  return make, fields


def _of_function(name: str, make: Make) -> tuple[Make, type]:
  """Makes fields of a function's parameters, as paxlite 0.2 did."""
  said = '%s: OPTIMIZER=%s is a function, which 0.4 refuses: write a class, as docs/library.md says'
  logging.getLogger('paxlite').warning(said, place_of(make), name)
  values = [p for p in inspect.signature(make).parameters.values() if p.name != 'schedule']
  default = lambda p: dataclasses.MISSING if p.default is p.empty else p.default
  fields = [(p.name, Any, dataclasses.field(default=default(p))) for p in values]
  return make, dataclasses.make_dataclass(make.__name__, fields, kw_only=True)


def find(name: str) -> Named:
  """Returns the optimizer of a name; raises UserError if it is unknown."""
  if name in NAMED:
    return NAMED[name]
  raise UserError(
    extensions.missing(f'OPTIMIZER={name}')
    or f'OPTIMIZER={name!r}: choose {", ".join(NAMED)}, or one that an imported module registers. '
    f'{did_you_mean(name, NAMED, 0.5)}'.rstrip()
  )


def is_by_layer(make: Callable[..., object]) -> bool:
  """Whether a function belongs to an optimizer registered with `by_layer`."""
  return any(named.by_layer and named.make is make for named in NAMED.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decayed:
  """An optimizer with a decay that is multiplied by the learning rate."""

  weight_decay: float = 1e-3
  weight_decay_factors: Sequence[str] = ()

  def chained(
    self, scaled: optax.GradientTransformation, rate: optax.GradientTransformation
  ) -> optax.GradientTransformation:
    return optax.chain(scaled, decayed(self.weight_decay, self.weight_decay_factors), rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moments(Decayed):
  adam_beta1: float = 0.9
  adam_beta2: float = 0.99
  adam_epsilon: float = 1e-6
  adam_epsilon_root: float = 0.0

  @property
  def of_adam(self) -> tuple[float, float, float, float]:
    return self.adam_beta1, self.adam_beta2, self.adam_epsilon, self.adam_epsilon_root


@register('adam', by_layer=True)
class adam(_Moments):
  """Pax's Adam: scale_by_pax_adam, decay of all trainable variables, and −schedule.

  Biases, norms and embeddings decay too. If gradients are clipped, which Optimizer.clip does, the
  state has an empty entry for it, as in older checkpoints.
  """

  adam_clip_threshold: Training[float] = 1.0  # maximum RMS of a variable's update; ≤ 0: off
  clip_gradient_norm_to_value: float = 5.0

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    clipping = [optax.identity()] if self.clip_gradient_norm_to_value > 0 else []
    scaled = scale_by_pax_adam(*self.of_adam, self.adam_clip_threshold)
    decay = decayed(self.weight_decay, self.weight_decay_factors)
    return Skippable(*optax.chain(*clipping, scaled, decay, scale_by_learning_rate(schedule)))


@register('adamw', by_layer=True)
class adamw(_Moments):
  """optax's AdamW (https://arxiv.org/abs/1711.05101)."""

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    scaled = optax.scale_by_adam(*self.of_adam)
    return self.chained(scaled, optax.scale_by_learning_rate(schedule))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Muon(_Moments):
  muon_momentum: Training[Below1] = 0.95  # decay rate of Muon's mean gradient
  muon_update_rms: Training[NotNegative] = (
    0.2  # RMS of Muon's updates, as AdamW's; 0: Keller Jordan's scale
  )
  muon_split_heads: Training[bool] = False  # Muon treats each query, key and value head as a matrix

  def updates(self, schedule: optax.Schedule, neuron_decay: float | None = None) -> Skippable:
    own = self.muon_momentum, self.muon_update_rms, self.muon_split_heads, neuron_decay
    scaled = scale_by_muon(*own, scale_by_pax_adam(*self.of_adam))
    return Skippable(*self.chained(scaled, scale_by_learning_rate(schedule)))


@register('muon')
class muon(_Muon):
  """Muon for matrices, and Adam for embeddings, norms, biases and the output head."""

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    return self.updates(schedule)


@register('normuon')
class normuon(_Muon):
  """Muon with updates of one size for all outputs (https://arxiv.org/abs/2510.05491)."""

  def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    return self.updates(schedule, self.adam_beta2)
