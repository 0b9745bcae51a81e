"""Edits of a built config: 'task.model.logit_cap=30' sets a value by its path.

`--fdl.task.PATH=VALUE` adds one to CONFIG_EDITS of the experiment, so that experiment.json holds it
and each program that builds the task sets the value again.
"""

import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, Never

from paxlite.config.attribute_kinds import broken_rule
from paxlite.config.attributes import Attributes, attribute_types, describe, read
from paxlite.config.templates import Node, apart, nodes
from paxlite.core.errors import UserError
from paxlite.core.near_names import near_names

EDITS = 'CONFIG_EDITS'
_ROOT = 'task.'
_TEXTS = bool, int, float, str, type(None)
_DTYPES = 'bfloat16', 'float16', 'float32'
_MOST = 3


def edited(cfg: Any, edits: Sequence[str], root: str = 'task') -> Any:
  """Returns the config of a task, or of its model, with the values that edits name.

  Paths that are not there are passed over: a model in plain XLA, or with unrolled layers, lacks
  fields of the one that is trained. `check` refuses them where a user writes them. A model that
  USE_INT8 wraps is edited without it too. Raises UserError if a value has another type than the one
  that is there.

  Args:
    cfg: The config.
    edits: Values by path, as CONFIG_EDITS.
    root: The path of `cfg`: 'task', or 'task.model'.
  """
  cfg = apart(cfg)
  known = {node.path: node for node in nodes(cfg, root)}
  for edit in edits:
    path, _, text = edit.partition('=')
    if path not in known:
      path = path.replace('task.model.model.', 'task.model.', 1)
    if path in known:
      known[path].set(_value(known[path], text))
  return cfg


def check(cls: type[Attributes], cfg: Any, edits: Sequence[str]) -> None:
  """Checks edits before they are made.

  Raises UserError if a path is not there, or its value is of another type or outside of its bounds.

  Args:
    cls: The class of the experiment. A value keeps to the bounds of the attribute of its name.
    cfg: The config of its task, without edits.
    edits: Its CONFIG_EDITS.
  """
  types = attribute_types(cls)
  for edit in edits:
    path, _, text = edit.partition('=')
    node = find(cfg, path)[0]
    value, annotation = _value(node, text), types.get(str(node.key).upper())
    dtypes = (*_DTYPES, 'int8') if node.key == 'moments_dtype' else _DTYPES
    if node.value in dtypes and value not in dtypes:
      raise UserError(f'--fdl.{edit}: the value must be one of {", ".join(dtypes)}')
    new, now = (_rule(x, annotation) for x in (value, node.value))
    if new and not now:
      raise UserError(f'--fdl.{edit}: the value {new}')


def _rule(value: object, annotation: object) -> str:
  """Returns the rule that a number breaks; '' for others."""
  return broken_rule(value, annotation) if isinstance(value, int | float) else ''


def find(cfg: Any, path: str, root: str = 'task') -> list[Node]:
  """Returns what a config has at a path: a value, or a config and all that it holds.

  Raises UserError if there is nothing at this path.
  """
  every = list(nodes(cfg, root))
  if found := [node for node in every if re.match(re.escape(path) + r'(?![^.\[])', node.path)]:
    return found
  meant = _meant(path, [node.path for node in every])
  raise UserError(f'{path} is not in the config of {root}. {meant}')


def _meant(path: str, known: Sequence[str]) -> str:
  """Returns a sentence on what a missing path may mean."""
  parent, _, name = path.rpartition('.')
  while not any(p.startswith(f'{parent}.') for p in known):
    if not parent:
      return f'Paths begin with {known[0]}.'
    parent, _, name = parent.rpartition('.')
  within = (re.match(re.escape(parent) + r'\.([^.\[]+)', p) for p in known)
  there = list(dict.fromkeys(m[1] for m in within if m))
  near = [f'{parent}.{n}' for n in near_names(name, there, 0.7)]
  if near := near or [p for p in known if p.endswith('.' + path.rpartition('.')[2])][:_MOST]:
    return f'Did you mean {" or ".join(near)}?'
  return f'{parent} has {", ".join(there)}'


def _value(node: Node, text: str) -> object:
  """Returns the value of a text, of the type of what is in its place."""
  flag = f'--fdl.{node.path}={text}'
  if text == repr(node.value):
    return node.value
  if node.is_config:
    raise UserError(
      f'{flag}: it is a config of several values: set one of them (paxlite show EXPERIMENT '
      f'--path={node.path} lists them), or override task() in a class'
    )
  expected = _of_texts(node.annotation)
  if expected is Any and node.value is not None:
    expected = type(node.value)
  try:
    value = read(text, expected)
  except ValueError:
    kind = '[]' if expected == list[Never] else describe(expected)
    raise UserError(f'{flag}: the value must be {kind}, and is {node.value!r} now') from None
  return tuple(value) if isinstance(node.value, tuple) and isinstance(value, list) else value


def _of_texts(annotation: Any) -> Any:
  """Returns the part of a type that text says, numbers and lists of them too; Never for none."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if annotation in (Any, list, dict, *_TEXTS) or origin is Literal:
    return annotation
  if origin in (typing.Union, types.UnionType):
    parts = tuple(part for part in map(_of_texts, args) if part is not Never)
    return typing.Union[parts] if parts else Never  # noqa: UP007
  if origin in (list, tuple, Sequence):
    return list[_of_texts(args[0])]  # type: ignore[misc]
  return Never
