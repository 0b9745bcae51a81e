"""Annotations of an experiment's attributes: what each one decides, and its bounds.

    NUM_LAYERS: Shape[Count] = 12
    DROPOUT_PROB: Training[Below1] = 0.0

The kind says which checks a change of the attribute must pass. Every list of attributes is derived
from the kinds.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar


class Kind(enum.Enum):
  """The part of an experiment that an attribute decides."""

  SHAPE = "the shapes of the model's variables"
  FUNCTION = 'what the model computes from variables of these shapes'
  TRAINING = 'what is trained, and on which data: it stays the same when a run is continued'
  RUN = 'only how a run goes: it may change whenever a run is continued'
  GENERATION = 'how text is generated from the same variables: it may change as well'


T = TypeVar('T')
Shape = Annotated[T, Kind.SHAPE]
Function = Annotated[T, Kind.FUNCTION]
Training = Annotated[T, Kind.TRAINING]
Run = Annotated[T, Kind.RUN]
Generation = Annotated[T, Kind.GENERATION]


@dataclasses.dataclass(frozen=True)
class Bounds:
  """The numbers that an attribute may have."""

  rule: str  # the end of a message about other numbers: 'must be at least 1'
  lowest: float = -math.inf  # the smallest number
  highest: float = math.inf  # the largest number
  below: float = math.inf  # all numbers are smaller than this one
  above: float = -math.inf  # all numbers are larger than this one

  def allow(self, value: float) -> bool:
    return self.lowest <= value <= self.highest and self.above < value < self.below


def at_most(highest: float) -> Bounds:
  return Bounds(f'must be at most {highest:g}', highest=highest)


Count = Annotated[int, Bounds('must be at least 1', lowest=1)]
Positive = Annotated[float, Bounds('must be positive', above=0)]
NotNegative = Annotated[float, Bounds('must not be negative', lowest=0)]
NotNegativeInt = Annotated[int, Bounds('must not be negative', lowest=0)]
# for attributes that 0 turns off
OffAtZero = Annotated[float, Bounds('must not be negative; 0 turns it off', lowest=0)]
OffAtZeroInt = Annotated[int, Bounds('must not be negative; 0 turns it off', lowest=0)]
Uint32 = Annotated[int, Bounds('must be from 0 to 2**32 - 1', lowest=0, highest=2**32 - 1)]
Below1 = Annotated[float, Bounds('must be at least 0 and below 1', lowest=0, below=1)]
Fraction = Annotated[float, Bounds('must be from 0 to 1', lowest=0, highest=1)]


def kind_of(annotation: object) -> Kind | None:
  """The kind that an annotation names; None where it names none."""
  metadata = getattr(annotation, '__metadata__', ())
  return next((m for m in metadata if isinstance(m, Kind)), None)


def with_kind(annotation: object, kind: Kind | None) -> object:
  """Returns `annotation`, with `kind` added where it names no kind."""
  if kind is None or kind_of(annotation) is not None:
    return annotation
  return Annotated[annotation, kind]


def names_of(annotations: Mapping[str, object], *kinds: Kind) -> list[str]:
  """The names of the attributes of these kinds."""
  return [name for name, annotation in annotations.items() if kind_of(annotation) in kinds]


def broken_rule(value: Any, annotation: object) -> str:
  """Returns the rule in `annotation` that a value of its type breaks; '' where it breaks none."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    rules = (m.rule for m in args[1:] if isinstance(m, Bounds) and not m.allow(value))
    return broken_rule(value, args[0]) or next(rules, '')
  if origin in (typing.Union, types.UnionType) and value is not None:
    return next(filter(None, (broken_rule(value, a) for a in args if a is not type(None))), '')
  return ''
