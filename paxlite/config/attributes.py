"""UPPER_CASE attributes of classes: typed, and overridden from the command line.

An `Attributes` subclass declares its attributes the way Pax experiments do:

    class GPT126M(LanguageModel):
      NUM_LAYERS = 12
      LR_COS_WARMUP: int = 636

Subclasses and mixins work as in Python. The type of an attribute is its annotation in the most
derived class that has one, or else the type of its default in the most basic class. A property with
an UPPER_CASE name is a derived attribute: it is computed from the others until it is set itself.

This module imports neither JAX nor Fiddle.
"""

import abc
import ast
import contextlib
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from paxlite import extensions
from paxlite.config.attribute_kinds import broken_rule, kind_of, with_kind
from paxlite.config.former_names import FORMER, current, refuse_both
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean
from paxlite.core.shell import shortened
from paxlite.files import paths
from paxlite.files.text_files import text_or_file

# Types of attributes that are paths, and the functions that read them
StoredPath = Annotated[str, paths.stored]  # on this machine, or an address
LocalPath = Annotated[str, paths.local]  # on this machine
AnyPath = Annotated[str, paths.expanded]  # TFDS reads from object stores
TextOrFile = Annotated[str, text_or_file]  # the text, or the name of a file that holds it

_types: dict[type, dict[str, object]] = {}  # the results of attribute_types
_signatures: dict[type, inspect.Signature] = {}


class derived:
  """A property that an instance attribute of the same name overrides (a non-data descriptor)."""

  def __init__(self, fget: Callable[[Any], Any]):
    self.fget = fget
    self.__doc__ = fget.__doc__

  def __get__(self, instance: object, owner: type | None = None) -> Any:
    return self if instance is None else self.fget(instance)


class _Signature:
  """The signature of a class, built on first use, because few classes are ever called."""

  def __get__(self, instance: object, owner: type) -> inspect.Signature:
    if owner not in _signatures:
      _signatures[owner] = _signature(owner)
    return _signatures[owner]


class _Renaming(abc.ABCMeta):
  """A metaclass that accepts former names of attributes."""

  def __setattr__(cls, name: str, value: object) -> None:
    has_it = name in FORMER and hasattr(cls, FORMER[name])
    super().__setattr__(current(name) if has_it else name, value)


class Attributes(metaclass=_Renaming):
  """Base class that makes UPPER_CASE attributes keyword arguments of `__init__`."""

  __signature__ = _Signature()

  def __init_subclass__(cls, **kwargs: object):
    super().__init_subclass__(**kwargs)
    _rename_former(cls)
    for name, value in list(vars(cls).items()):
      if _is_attribute(name) and isinstance(value, property) and value.fget:
        setattr(cls, name, derived(value.fget))
    _check_attributes(cls)

  def __init__(self, **overrides: object):
    for name, value in overrides.items():
      setattr(self, name, value)

  def __setattr__(self, name: str, value: object) -> None:
    name = current(name)
    super().__setattr__(name, value if name.startswith('_') else convert(type(self), name, value))

  def __repr__(self) -> str:
    set_here = [f'{k}={v!r}' for k, v in vars(self).items() if not k.startswith('_')]
    return f'{type(self).__name__}({", ".join(set_here)})'

  def check_bounds(self) -> None:
    """Raises UserError where a number is outside the bounds of its annotation, or text is none."""
    for name, annotation in attribute_types(type(self)).items():
      value = getattr(self, name)
      for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not _is_text(text):
          raise UserError(f'{name}: {text!r} is not valid text: it has half of a surrogate pair')
      if rule := broken_rule(value, annotation):
        raise UserError(f'{name}={value:g} {rule}' if value < 1e6 else f'{name}={value} {rule}')

  def replaced(self, **changes: object) -> Self:
    """A copy with these changes; attributes that are derived from others follow them."""
    cls = type(self)
    kept = {
      name: value
      for name, value in self.values().items()
      if name in vars(self) or not isinstance(getattr(cls, name), derived)
    }
    return cls(**kept | changes)

  def is_stated_by_user(self, name: str) -> bool:
    """Whether a user has set an attribute: of an object, or in a class outside of paxlite."""
    cls = type(self)
    owner = next(base for base in cls.__mro__ if name in vars(base))
    value = vars(cls).get(name, vars(owner)[name])
    if not owner.__module__.startswith('paxlite.'):
      return True
    return name in vars(self) and (isinstance(value, derived) or getattr(self, name) != value)

  def values(self) -> dict[str, object]:
    """Every attribute and its value in this object, derived ones included, sorted by name."""
    return {name: getattr(self, name) for name in sorted(attribute_types(type(self)))}


class _Former:
  """The former name of an attribute, which reads the attribute (a non-data descriptor)."""

  def __init__(self, name: str):
    self.name = name

  def __get__(self, instance: object, owner: type) -> Any:
    return getattr(owner if instance is None else instance, current(self.name))


for _name in FORMER:
  setattr(Attributes, _name, _Former(_name))


def _rename_former(cls: type) -> None:
  """Gives a class the present names of what it, or a plain mixin, states by former names.

  A mixin stays as it is, because it may belong to others, and what stands before it goes first.
  """
  refuse_both(vars(cls))
  for name, now in FORMER.items():
    if not hasattr(cls, now):
      if name in vars(cls) or name in inspect.get_annotations(cls):
        raise UserError(
          f'{cls.__name__}.{name}: this was the name of {now} in other models: choose another one'
        )
      continue
    owner = next(base for base in cls.__mro__ if name in vars(base) or now in vars(base))
    if owner is not Attributes and now not in vars(owner):
      setattr(cls, current(name), vars(owner)[name])
    if name in vars(cls):
      delattr(cls, name)


def attribute_types(cls: type) -> Mapping[str, object]:
  """The attributes of an `Attributes` class with their types.

  Args:
    cls: A subclass of `Attributes`.

  Returns:
    The types by name: bool, int, float, str, list[...], a union with None, or a Literal. A type may
    be Annotated with a kind, bounds and a function that reads the value.
  """
  if cls in _types:
    return _types[cls]
  found = _types[cls] = {}
  for base in reversed(cls.__mro__):
    hints = inspect.get_annotations(base, eval_str=True)
    for name, value in vars(base).items():
      if not _is_attribute(name):
        continue
      if name in hints:
        found[name] = with_kind(hints[name], kind_of(found.get(name)))
      elif isinstance(value, derived):
        hint = inspect.get_annotations(value.fget, eval_str=True).get('return', Any)
        found.setdefault(name, hint)
      elif name not in found:
        found[name] = _type_of(value)
  return found


def convert(cls: type, name: str, value: object) -> object:
  """Returns `value` (an object, not text) as the type of the attribute `name`.

  Raises UserError if the class has no such attribute, or the value has another type.
  """
  expected = _type_of_attribute(cls, name)
  try:
    return _convert(value, expected)
  except UserError as e:
    raise UserError(f'{cls.__name__}.{name}: {e}') from None
  except (TypeError, ValueError, OverflowError):
    raise UserError(_mismatch(cls, name, value)) from None


def parse(cls: type, name: str, text: str) -> object:
  """Reads the text of `--fdl.NAME=text` as a value of the type of that attribute.

  Strings may be bare or quoted (`bfloat16`, `"bfloat16"`), also in lists (`[data,mdl]`). Lists may
  be quoted as in Pax's scripts (`[8,1,1]`, `"[8, 1, 1]"`). Integers may be written `1e6` or
  `1_000_000`. A list of strings needs no brackets: `a.jsonl`, `a.jsonl,b.jsonl`. A choice may be in
  capitals or small letters, such as Pax's `save_nothing`. Raises UserError if the class has no such
  attribute, or the text is not a value of its type.
  """
  expected = _type_of_attribute(cls, name)
  try:
    return read(text, expected)
  except UserError as e:
    raise UserError(f'{name}: {e}') from None
  except ValueError:
    raise UserError(_mismatch(cls, name, text)) from None


def read(text: str, expected: object) -> object:
  """Reads a text as a value of a type; see `parse`.

  Raises:
    UserError: The function in the type that reads the value refuses it.
    ValueError: The text is not a value of the type.
  """
  value = _literal(text)
  attempts = [value]
  if isinstance(value, str):  # a quoted list or number, or the shell's true
    if re.fullmatch(r"""\[[^\[\]'"]+\]""", value.strip()):
      attempts.append([word.strip() for word in value.strip()[1:-1].split(',')])
    attempts += [_literal(value), {'true': True, 'false': False}.get(value.lower(), value)]
    if words := _words(value):
      attempts.append(words)
    attempts += [value.upper(), value.lower()]
  else:
    attempts.append(text.strip())  # VOCAB_PATH=8000 is a string too, and TRAIN_FILES=8000 a list
    if (words := _words(text.strip())) and not isinstance(value, bool | None):
      attempts.append(words)
  for attempt in attempts:
    try:
      return _convert(attempt, expected)
    except UserError:
      raise
    except (TypeError, ValueError, OverflowError):
      continue
  raise ValueError(text)


def describe(expected: object) -> str:
  """A type as users read it: `int`, `list[int]`, `float or None`, `one of 'a', 'b'`."""
  origin = typing.get_origin(expected)
  if origin is Literal:
    return 'one of ' + ', '.join(repr(a) for a in typing.get_args(expected))
  if origin in (typing.Union, types.UnionType):
    return ' or '.join(describe(a) for a in typing.get_args(expected))
  if origin is Annotated:
    return describe(typing.get_args(expected)[0])
  if origin in (list, tuple, Sequence):
    return f'list[{", ".join(map(describe, typing.get_args(expected)[:1]))}]'
  if expected is type(None):
    return 'None'
  if origin is not None:
    return str(expected)
  return getattr(expected, '__name__', str(expected))


def _is_attribute(name: str) -> bool:
  return name.isupper() and not name.startswith('_') and name not in FORMER


def _literal(text: str) -> object:
  """`text` as a Python literal, or unchanged where it is none."""
  try:
    return ast.literal_eval(text.strip())
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return text.strip()


def _words(text: str) -> list[str]:
  """Splits a list of strings without brackets into its words.

  There are none where a word is empty, or where the text begins with a bracket or a quote. A comma
  within brackets, such as that of {1,2} in a regular expression, separates nothing.
  """
  words = [word.strip() for word in re.split(r',(?![^\[({]*[\])}])', text)]
  return words if all(words) and text[0] not in '[({\'"' else []


def _type_of_attribute(cls: type, name: str) -> object:
  known = attribute_types(cls)
  name = current(name)
  if name not in known:
    way_out = f'paxlite show {cls.__name__} lists them.'
    raise UserError(_unknown(cls, name, known, way_out))
  return known[name]


def _check_attributes(cls: type) -> None:
  """Refuses attributes of a class body that no run would read: `num_layers = 3`, `LR = 0.1`.

  Methods, properties, nested classes and names that begin with an underscore are allowed. Raises
  UserError if a name is unknown and not annotated as new, or a value has another type.
  """
  plain = [base for base in cls.__mro__ if not issubclass(base, Attributes) and base is not object]
  stated = {name for base in cls.__mro__[1:] if issubclass(base, Attributes) for name in vars(base)}
  stated |= {name for base in plain for name in inspect.get_annotations(base)}
  known = set(filter(_is_attribute, stated))
  if not known:
    return  # the first class of a family declares the attributes
  for owner in [cls, *plain]:
    annotated = inspect.get_annotations(owner)
    for name, value in vars(owner).items():
      if name in known:
        if not isinstance(value, derived | property):
          found = convert(cls, name, value)
          if owner is cls and type(found) is str and found != value:
            setattr(cls, name, found)  # the path of a home folder, the text of a file
      elif FORMER.get(name) in known:
        continue
      elif _is_attribute(name) or name in FORMER:
        if not isinstance(value, derived) and name not in annotated:
          shown = f'{name}: {type(value).__name__} = {shortened(repr(value))}'
          way_out = f'If it is a new attribute, annotate it: {shown}'
          raise UserError(_unknown(cls, name, known, way_out))
      elif not (name.startswith('_') or callable(value) or hasattr(type(value), '__get__')):
        way_out = f'Attributes are in UPPER_CASE; other names begin with an underscore: _{name}'
        raise UserError(_unknown(cls, name, known, way_out))


def _is_text(text: str) -> bool:
  """Whether a file can have this name; names with bytes that are no UTF-8 are allowed."""
  try:
    os.fsencode(text)
  except UnicodeEncodeError:
    return False
  return True


def _unknown(cls: type, name: str, known: Iterable[str], way_out: str) -> str:
  """The message for a name that is not in `known`, with the nearest known names and a way out."""
  if absent := extensions.lacking(name):
    return absent
  hint = extensions.hint('attribute', name).strip() or did_you_mean(name, known)
  return ' '.join(filter(None, [f'{cls.__name__} has no attribute {name}.', hint, way_out]))


def _mismatch(cls: type, name: str, value: object) -> str:
  expected = _type_of_attribute(cls, name)
  shown = ''
  for example in (vars(base)[name] for base in cls.__mro__ if name in vars(base)):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
      shown = f', for example {_convert(example, expected)!r}'
      break
  return f'{cls.__name__}.{name} must be {describe(expected)}{shown}; got {value!r}'


def _signature(cls: type) -> inspect.Signature:
  """Keyword-only arguments for every attribute, so that Fiddle sees and prints all of them."""
  parameters = []
  for name in sorted(attribute_types(cls)):
    default = getattr(cls, name)
    if isinstance(default, derived):
      default = None  # "computed": Fiddle leaves it out of the config until it is set
    parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
  return inspect.Signature(parameters)


def _type_of(value: object) -> object:
  if value is None:
    return Any
  if isinstance(value, (list, tuple)):
    kinds = {type(v) for v in value}
    return list[kinds.pop()] if len(kinds) == 1 else list  # type: ignore[misc]
  return type(value)


def _convert(value: object, expected: object) -> object:
  """Returns `value` as `expected`.

  Raises TypeError, ValueError or OverflowError where that is impossible or loses something.
  """
  origin, args = typing.get_origin(expected), typing.get_args(expected)
  if expected is Any:
    return value
  if origin is Literal:
    if hasattr(value, 'dtype'):
      value = _as_text(value)
    if value not in args:
      raise ValueError(value)
    return value
  if origin in (typing.Union, types.UnionType):
    for arg in sorted(args, key=lambda a: a is not type(None)):  # None first: str takes anything
      try:
        return _convert(value, arg)
      except (TypeError, ValueError):
        continue
    raise TypeError(value)
  if origin is Annotated:
    value = _convert(value, args[0])
    for metadata in filter(callable, args[1:]):
      value = metadata(value)
    return value
  if expected is type(None):
    if value is not None:
      raise TypeError(value)
    return None
  if expected is list or origin in (list, tuple, Sequence):
    if not isinstance(value, (list, tuple)):
      raise TypeError(value)
    return [_convert(v, args[0]) for v in value] if args else list(value)
  if expected is bool:
    if value not in (True, False):  # 0 and 1 are allowed
      raise TypeError(value)
    return bool(value)
  if expected is int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value:
      raise TypeError(value)
    if abs(value) >= 1 << 100:  # Python does not print integers of thousands of digits
      raise OverflowError(value)
    return int(value)
  if expected is float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
      raise TypeError(value)
    return float(value)
  if expected is str:
    return _as_text(value)
  if isinstance(expected, type) and isinstance(value, expected):
    return value
  raise TypeError(value)


def _as_text(value: object) -> str:
  if isinstance(value, str):
    return value
  name = getattr(value, '__name__', None)  # jnp.bfloat16 and similar types have a name and a dtype
  if name is None or not hasattr(value, 'dtype'):
    raise TypeError(value)
  return name
