"""Parts that few models have, and that any experiment gets which sets an attribute of theirs.

`paxlite train LLaMA3_8B RESIDUAL_FACTOR=0.5` trains LLaMA3_8B with the part ResidualFactor between
LLaMA and LanguageModel. The class keeps its name: experiment.json has the values, and the same
class follows from them. A class in a file names such a part as a base.
Extensions add such parts; see Extension.options.
"""

import functools
import inspect
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

from paxlite import extensions
from paxlite.config.attributes import Attributes, attribute_types, derived
from paxlite.config.former_names import current, current_values
from paxlite.core.errors import UserError
from paxlite.core.extension import imported

_HERE = 'paxlite.experiments.parts'
_PARTS = {
  f'{_HERE}.attention_sinks:AttentionSinkLogits': ('USE_ATTENTION_SINKS',),
  f'{_HERE}.embedding_factors:EmbeddingFactors': (
    'SCALE_EMBEDDING', 'EMBEDDING_FACTOR', 'LOGITS_DIVISOR',
  ),
  f'{_HERE}.local_positions:LocalPositions': ('ROPE_LOCAL_THETA', 'ROPE_STRETCHES_LOCAL'),
  f'{_HERE}.logits_bias:LogitsBias': ('USE_SOFTMAX_BIAS',),
  'paxlite.experiments.phi.long_positions:LongPositions': (
    'ROPE_SHORT_FACTORS', 'ROPE_LONG_FACTORS',
  ),
  f'{_HERE}.parallel_blocks:ParallelBlocks': ('BLOCK_ORDER',),
  f'{_HERE}.partial_positions:PartialPositions': ('ROPE_FRACTION',),
  f'{_HERE}.prediction:MultiTokenPrediction': ('NUM_PREDICTION_MODULES', 'PREDICTION_LOSS_WEIGHT'),
  f'{_HERE}.attention_temperature:AttentionTemperature': (
    'ATTENTION_TEMPERATURE_SCALE', 'ATTENTION_TEMPERATURE_FLOOR',
  ),
  'paxlite.experiments.granite.residual_factor:ResidualFactor': ('RESIDUAL_FACTOR',),
}  # fmt: skip
# What one family alone has now, and every language model had: False changes nothing.
_FORMER = {
  'USE_OUTPUT_GATE': 'qwen_hybrid:Qwen3_5', 'QK_NORM_AFTER_ROTATION': 'hunyuan:HunyuanDense'
}  # fmt: skip

T = TypeVar('T', bound=type)


def with_parts(cls: T, values: Mapping[str, object]) -> T:
  """Returns a class with the parts whose attributes these values set, and that it does not have.

  Args:
    cls: A class of experiments.
    values: Values by attribute. Those that a part has anyway ask for no part.
  """
  now = {current(name): value for name, value in values.items()}
  return with_attributes(cls, (k for k, v in now.items() if k in _of() and v != usual(k, v)))


def with_attributes(cls: T, names: Iterable[str]) -> T:
  """Returns a class with the parts that have these attributes, and that it does not have.

  Raises UserError if one family alone has such an attribute, and the class is none of it.
  """
  names = list(names)
  refuse_lost(cls, {name: None for name in names if name in _FORMER})
  wanted = {_of()[name] for name in map(current, names) if name in _of() and not hasattr(cls, name)}
  return _composed(cls, tuple(part for part in _parts() if part in wanted)) if wanted else cls


def usual(name: str, value: object) -> object:
  """Returns the value with which an attribute changes nothing in a class that does not have it.

  Args:
    name: An attribute.
    value: What is returned for an attribute of no such part, or that follows from others.
  """
  if name in _FORMER:
    return False
  if name not in _of():
    return value
  found = getattr(imported(_of()[name]), name)
  return value if isinstance(found, derived) else found


def value(experiment: object, name: str) -> Any:
  """Returns an attribute of an experiment, or what changes nothing where its class has none."""
  return getattr(experiment, name) if hasattr(type(experiment), name) else usual(name, None)


def kept(cls: type, values: Mapping[str, object]) -> dict[str, Any]:
  """Returns values without those that change nothing, of attributes that a class does not have."""
  known, values = attribute_types(cls), current_values(values)
  return {k: v for k, v in values.items() if not is_lost(known, k) or v != usual(k, v)}


def is_lost(known: Container[str], name: str) -> bool:
  """Whether an attribute that every language model had is unknown."""
  return (name in _of() or name in _FORMER) and name not in known


def refuse_lost(cls: type, values: Mapping[str, object]) -> None:
  """Raises UserError if values have what other models alone have, and a class does not."""
  known = attribute_types(cls)
  for name in kept(cls, values):
    if is_lost(known, name):
      raise UserError(missing(cls, name))


def refuse_attributes(cls: type) -> None:
  """Raises UserError if a class, or its plain mixin, states what none of its bases declares.

  A class of paxlite that annotates such an attribute declares it. A user's would change nothing.
  """
  is_ours = cls.__module__.startswith('paxlite.')
  bases = [base for base in cls.__mro__[1:] if issubclass(base, Attributes)]
  for owner in (base for base in cls.__mro__ if base not in bases):
    for given, stated in vars(owner).items():
      is_new = given in inspect.get_annotations(owner) or isinstance(stated, property)
      name = current(given)
      if (is_ours and is_new) or any(name in vars(base) for base in bases):
        continue
      if message := missing(cls, name):
        raise UserError(message)


def missing(cls: type, name: str) -> str:
  """Returns the message for an attribute of other models that a class lacks; '' for others."""
  start = f'{cls.__name__} has no attribute {name}, which belongs to '
  if name in _FORMER:
    module, _, model = _FORMER[name].partition(':')
    return f'{start}another model: derive it from {model} of paxlite.experiments.{module}'
  if name not in _of():
    return ''
  module, _, part = _of()[name].partition(':')
  return f'{start}a part: write class {cls.__name__}({part}, …), with {part} from {module}'


@functools.cache
def _parts() -> dict[str, tuple[str, ...]]:
  """Returns the names of attributes by their parts: those of the core, and of extensions."""
  return _PARTS | {k: names for e in extensions.found() for k, names in e.options.items()}


@functools.cache
def _of() -> dict[str, str]:
  return {name: part for part, names in _parts().items() for name in names}


@functools.cache
def _composed(cls: Any, references: tuple[str, ...]) -> Any:
  names = {k: getattr(cls, k) for k in ('__module__', '__qualname__', '__doc__')}
  parts = [part for part in map(imported, references) if issubclass(cls, part.__base__)]
  named, steps = vars(cls).get('_composed_of', (cls, ()))
  names |= {'_composed_of': (named, (*steps, references)), '__reduce_ex__': _reduced}
  return type(cls.__name__, (cls, *parts), names)


def _reduced(x: Any, protocol: Any) -> Any:
  """Pickles an object whose class has the name of another, of which it is composed again."""
  made = vars(type(x)).get('_composed_of')
  if not made:  # of a class below it
    return object.__reduce_ex__(x, protocol)
  return _restored, (*made, vars(x))


def _restored(named: Any, steps: tuple[tuple[str, ...], ...], state: dict[str, object]) -> Any:
  cls = functools.reduce(_composed, steps, named)
  experiment = object.__new__(cls)
  vars(experiment).update(state)
  return experiment
