"""The keys of a Hugging Face config.json, each with the attributes that it becomes and back.

A family's table lists the keys that it has. A key that no table names, and that is not known to be
harmless, may change what a model computes. It is refused, so that tomorrow's keys are not ignored.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.key_values import interval, is_on
from paxlite.weights.known_keys import HARMLESS, NEUTRAL, check_known, shortened

Config = Mapping[str, Json]


class Key(Protocol):
  """Some keys of config.json and the attributes that they decide."""

  @property
  def theirs(self) -> Sequence[str]:
    """The names of the keys."""

  @property
  def ours(self) -> Sequence[str]:
    """The names of the attributes."""

  def read(self, config: Config) -> dict[str, object]:
    """Returns the attributes; a KeyError names a key that is missing."""

  def write(self, e: LanguageModel) -> JsonObject:
    """Returns the keys."""


_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class _OneToOne:
  """A key, and the one attribute that it decides."""

  key: str
  attribute: str

  @property
  def theirs(self) -> Sequence[str]:
    return (self.key,)

  @property
  def ours(self) -> Sequence[str]:
    return (self.attribute,)


@dataclasses.dataclass(frozen=True)
class Same(_OneToOne):
  """A key with the value of an attribute."""

  default: object = _REQUIRED  # the attribute's value where the key is missing or null
  null: object = _REQUIRED  # the attribute's value that the file writes as null, if there is one

  def read(self, config: Config) -> dict[str, object]:
    value = config.get(self.key)
    if value is not None:
      return {self.attribute: value}
    if self.key in config and self.null is not _REQUIRED:
      return {self.attribute: self.null}
    if self.default is _REQUIRED:
      raise KeyError(self.key)
    return {self.attribute: self.default}

  def write(self, e: LanguageModel) -> JsonObject:
    value = options.value(e, self.attribute)
    return {self.key: None if value == self.null else value}


@dataclasses.dataclass(frozen=True)
class Cap(_OneToOne):
  """A key of a cap on logits, null for none, and the attribute, 0 or less where there is none.

  A file with 0 or less is refused: transformers divides by it, and here it turns the cap off.
  """

  is_required: bool = True  # whether a file without the key is refused

  def read(self, config: Config) -> dict[str, object]:
    value = config[self.key] if self.is_required else config.get(self.key)
    if value is not None and not value > 0:
      raise UserError(f'{self.key}={value!r} must be above 0, or null')
    return {self.attribute: -1.0 if value is None else value}

  def write(self, e: LanguageModel) -> JsonObject:
    value = options.value(e, self.attribute)
    return {self.key: value if value > 0 else None}


class OneOf:
  """A key with few implemented values, which all mean the same.

  A missing key means the same too, and so does null where the values are false.
  """

  def __init__(self, key: str, *values: Json):
    self.theirs: Sequence[str] = (key,)
    self.ours: Sequence[str] = ()
    self._values = values

  def read(self, config: Config) -> dict[str, object]:
    value = config.get(self.theirs[0], self._values[0])
    if value not in self._values and (value is not None or self._values[0]):
      raise UserError(f'{self.theirs[0]}={value!r} is not supported')
    return {}

  def write(self, e: LanguageModel) -> JsonObject:
    return {self.theirs[0]: self._values[0]}


@dataclasses.dataclass(frozen=True)
class Repeated:
  """A key that repeats the value of another one, if a file has it."""

  key: str
  other: str  # the key with the same value
  written: str = ''  # the attribute that is written as the key; '': the key is not written
  ours: Sequence[str] = ()

  @property
  def theirs(self) -> Sequence[str]:
    return (self.key,)

  def read(self, config: Config) -> dict[str, object]:
    value, expected = config.get(self.key), config.get(self.other)
    if value not in (None, expected):
      raise UserError(
        f'{self.key}={value!r} is not supported: it must be {self.other}={expected!r}'
      )
    return {}

  def write(self, e: LanguageModel) -> JsonObject:
    return {self.key: options.value(e, self.written)} if self.written else {}


@dataclasses.dataclass(frozen=True)
class Both:
  """Keys that are converted by functions."""

  theirs: Sequence[str]  # the keys
  ours: Sequence[str]  # the attributes
  read: Callable[[Config], dict[str, object]]  # converts a config to the attributes
  write: Callable[[LanguageModel], JsonObject]  # converts an experiment to the keys


def read_keys(keys: Sequence[Key], config: Config) -> dict[str, object]:
  """Returns the attributes of a config.

  Raises:
    UserError: A key or its value is not supported.
    KeyError: A key is missing.
  """
  known = {name for key in keys for name in key.theirs}
  check_known({k: v for k, v in config.items() if k not in known}, HARMLESS, NEUTRAL)
  values: dict[str, object] = {}
  for key in keys:
    try:
      values |= key.read(config)
    except UserError:
      raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError):
      given = {name: config[name] for name in key.theirs if name in config}
      shown = ', '.join(f'{name}={shortened(value)}' for name, value in given.items())
      raise UserError(f'{shown or key.theirs[0]}: no model of this family has this') from None
  return values


def _read_heads(config: Config, required: Sequence[str]) -> dict[str, object]:
  heads = config['num_attention_heads']
  for name in required:
    if name not in config:
      raise KeyError(name)
  stated, groups = config.get('head_dim'), config.get('num_key_value_heads')
  width = config['hidden_size'] // heads if stated is None else stated
  return {
    'NUM_HEADS': heads, 'NUM_KV_HEADS': heads if groups is None else groups,
    'MODEL_DIMS': config['hidden_size'], 'DIMS_PER_HEAD': width,
    'HEADS_SPAN_MODEL': heads * width == config['hidden_size'],
  }  # fmt: skip


def heads(*required: str) -> Both:
  """Returns the keys of heads; those that are not required are derived where a file has none."""
  return Both(
    ('num_attention_heads', 'num_key_value_heads', 'hidden_size', 'head_dim'),
    ('NUM_HEADS', 'NUM_KV_HEADS', 'MODEL_DIMS', 'DIMS_PER_HEAD'),
    lambda config: _read_heads(config, required),
    lambda e: {
      'num_attention_heads': e.NUM_HEADS, 'num_key_value_heads': e.NUM_KV_HEADS,
      'hidden_size': e.MODEL_DIMS, 'head_dim': e.DIMS_PER_HEAD,
    },
  )  # fmt: skip


# Names of activations in transformers, and in experiments; the first of two is written.
_ACTIVATIONS = {
  'silu': 'silu', 'gelu_pytorch_tanh': 'gelu', 'gelu_new': 'gelu', 'gelu_fast': 'gelu',
  'gelu': 'gelu_exact', 'relu': 'relu', 'relu2': 'relu2',
}  # fmt: skip


def activation(
  key: str,
  *others: str,
  default: str = '',
  written: str = '',
  ours: Sequence[str] = ('ACTIVATION_CLS',),
) -> Both:
  """Returns the key of the activation.

  Args:
    *others: Further keys that some files have for it.
    default: The activation of files without the key.
    written: The name to write where several names stand for the same activation.
    ours: The attributes, which all have the same value.
  """

  def read(config: Config) -> dict[str, object]:
    name = config.get(key) or default or config[key]
    if name not in _ACTIVATIONS:
      raise UserError(
        f'activation {name!r} is not supported; paxlite has {", ".join(_ACTIVATIONS)}'
      )
    return dict.fromkeys(ours, _ACTIVATIONS[name])

  def write(e: LanguageModel) -> JsonObject:
    found = {attribute: options.value(e, attribute) for attribute in ours}
    names = [theirs for theirs, value in _ACTIVATIONS.items() if {value} == set(found.values())]
    if not names:
      wrong = ' and '.join(f'{attribute}={value}' for attribute, value in found.items())
      raise UserError(f'Hugging Face has no {wrong}')
    return dict.fromkeys((key, *others), written if written in names else names[0])

  return Both((key, *others), ours, read, write)


def positions(key: str) -> Both:
  """Returns the key of the number of positions, which are also the longest rows of training."""
  ours = ('MAX_POSITION_EMBEDDINGS', 'MAX_SEQ_LEN')

  def read(config: Config) -> dict[str, object]:
    return dict.fromkeys(ours, Same(key, ours[0]).read(config)[ours[0]])

  return Both((key,), ours, read, lambda e: {key: max(options.value(e, name) for name in ours)})


def tied(default: bool) -> Both:
  """Returns the key of tied embeddings, whose default differs between families."""
  name = 'tie_word_embeddings'
  return Both(
    (name,),
    ('SEPARATE_EMBEDDING',),
    lambda config: {'SEPARATE_EMBEDDING': not is_on(config, name, default)},
    lambda e: {name: not e.SEPARATE_EMBEDDING},
  )


def window(missing: int = 0) -> Both:
  """Returns the key of a sliding window of all layers, which is null where there is none.

  Args:
    missing: The window of files without the key; 0: none.
  """
  name = 'sliding_window'

  def read(config: Config) -> dict[str, object]:
    value = config.get(name, missing or None)
    if value is not None and not value > 0:  # transformers would mask everything
      raise UserError(f'{name}={value!r} must be above 0, or null')
    return {'SLIDING_WINDOW': 0 if value is None else value}

  return Both(
    (name,), ('SLIDING_WINDOW',), read,
    lambda e: {name: e.SLIDING_WINDOW if e.SLIDING_WINDOW > 0 else None},
  )  # fmt: skip


# Kinds of attention in layer_types, and in ATTENTION_PATTERN.
KINDS = {'sliding_attention': 'sliding', 'full_attention': 'full'}


def shortest(pattern: list[str]) -> list[str]:
  """Returns the shortest beginning of a pattern that gives all of it when it is repeated."""
  periods = range(1, len(pattern) + 1)
  same = lambda n: pattern == [pattern[i % n] for i, _ in enumerate(pattern)]
  return pattern[: next(filter(same, periods), 0)]


def read_types(
  config: Config, default: Callable[[int], str], kinds: Mapping[str, str] = KINDS
) -> list[str]:
  """Returns ATTENTION_PATTERN from layer_types, or from a function of the number of the block.

  Args:
    default: The kind of a block in a file without layer_types.
    kinds: The kinds of ATTENTION_PATTERN by those of layer_types.
  """
  layers, given = config['num_hidden_layers'], config.get('layer_types')
  if given is None:
    return shortest([default(i) for i in range(layers)])
  if len(given) != layers or not set(given) <= set(kinds):
    raise UserError(f'layer_types must have {layers} of {" and ".join(kinds)}')
  return shortest([kinds[kind] for kind in given])


def write_types(
  e: LanguageModel, plain: str | None = None, kinds: Mapping[str, str] = KINDS
) -> list[str]:
  """Returns layer_types; `plain` is the kind of blocks for which ATTENTION_PATTERN has none."""
  names = {ours: theirs for theirs, ours in kinds.items()}
  found = [kind.attention or plain for kind in e.block_kinds]
  if not set(found) <= set(names):
    raise UserError(
      f'Hugging Face has no ATTENTION_PATTERN={e.ATTENTION_PATTERN} in this family: its blocks are '
      f'{" or ".join(names)}'
    )
  return [names[str(kind)] for kind in found]


def layer_types(default: Sequence[str], *others: str) -> Both:
  """Returns the keys of sliding attention that alternates with full attention.

  Args:
    default: The kinds that are repeated in a file without layer_types.
    *others: Keys that say the same in another way.
  """

  def read(config: Config) -> dict[str, object]:
    period = interval(config, 'sliding_window_pattern', 0)
    repeated = [*['sliding'] * (period - 1), 'full'] if period else default
    pattern = read_types(config, lambda i: repeated[i % len(repeated)])
    return {'SLIDING_WINDOW': config['sliding_window'], 'ATTENTION_PATTERN': pattern}

  return Both(
    ('layer_types', 'sliding_window', *others), ('SLIDING_WINDOW', 'ATTENTION_PATTERN'), read,
    lambda e: {'layer_types': write_types(e), 'sliding_window': e.SLIDING_WINDOW},
  )  # fmt: skip
