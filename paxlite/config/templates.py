"""Linen modules as Fiddle templates.

A module names its children as fields that hold templates, and calls a template once per use:

    class Block(nn.Module):
      ffn_tpl: Template = template_field(FeedForward)

      @nn.compact
      def __call__(self, x):
        return x + self.ffn_tpl(name='ffn')(x)

`config(Block)` and `template(Block)` turn that into a Fiddle tree in which every child can be
edited (`cfg.ffn_tpl.hidden = 99`) or swapped (`cfg.ffn_tpl = template(GatedFeedForward)`). Without
Fiddle, `Block()` works as well: the default of a template field is a plain `functools.partial`.

Children are templates for two reasons. A child that is already built and used in a loop would
silently share its parameters between the uses. If the default were a class, an edit of one config
would change all configs.
"""

import contextlib
import copy
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fiddle as fdl
from fiddle import selectors

from paxlite.core.errors import UserError

# A selection that finds nothing would leave the model as it is. Fiddle only warns of it so far,
# and says that it will be an error, as select(…, check_nonempty=True) is now.
selectors.select.__kwdefaults__ = {
  **(selectors.select.__kwdefaults__ or {}),
  'check_nonempty': True,
}

# Modules are called with arguments of their own, so that no one type fits what a template makes.
Template = Callable[..., Any]

_B = TypeVar('_B', bound=fdl.Buildable)
_METADATA_KEY = 'paxlite_template'


def template_field(cls: Callable[..., object]) -> Template:
  """A dataclass field that holds a template, by default a template of `cls` with its defaults."""
  return dataclasses.field(
    default_factory=lambda: functools.partial(cls), metadata={_METADATA_KEY: cls}
  )


def template(cls: Callable[..., object], **kwargs: object) -> fdl.Partial:
  """A Fiddle template of `cls`. It builds to a callable that makes a new `cls` at each call."""
  return _with_children(fdl.Partial(cls, **kwargs), cls)


def config(cls: Callable[..., object], **kwargs: object) -> fdl.Config:
  """A Fiddle config of `cls` that contains the default children, so that they can be edited."""
  return _with_children(fdl.Config(cls, **kwargs), cls)


@contextlib.contextmanager
def selections_named(where: str) -> Iterator[None]:
  """Turns Fiddle's error for a selection that finds nothing into a UserError."""
  try:
    yield
  except ValueError as e:
    found = re.match(r"Selection .*fn_or_cls=(?:<\w+ )?'?([\w.]+).* is empty!", str(e))
    if found is None:
      raise
    raise UserError(
      f'{where}: selectors.select finds no {found[1]} in the config, so nothing would change: '
      'name a class of the config (paxlite show lists them), or pass check_nonempty=False'
    ) from None


@dataclasses.dataclass(frozen=True)
class Node:
  """A value in a config."""

  path: str  # where it is, as 'task.model.logit_cap' or 'task.model.prediction_tpls[0]'
  value: Any  # the value: a config, a template, or what is none
  holder: Any = None  # the config, list or dict that holds it; None for the whole config
  key: Any = None  # its name or its index there

  @property
  def is_config(self) -> bool:
    return isinstance(self.value, fdl.Buildable)

  @property
  def annotation(self) -> object:
    """The type that the class or function of the holder states; Any if it states none."""
    if not isinstance(self.holder, fdl.Buildable):
      return Any
    with contextlib.suppress(NameError, TypeError):  # names that only type checkers import
      return typing.get_type_hints(fdl.get_callable(self.holder)).get(self.key, Any)
    return Any

  def set(self, value: object) -> None:
    """Puts another value in the place of this one."""
    if isinstance(self.holder, fdl.Buildable):
      setattr(self.holder, self.key, value)
    else:
      self.holder[self.key] = value

  def __str__(self) -> str:
    if not self.is_config:
      return f'{self.path} = {self.value!r}'
    made = fdl.get_callable(self.value)
    kind = 'template of ' if isinstance(self.value, fdl.Partial) else ''
    return f'{self.path}: {kind}{made.__module__}.{made.__qualname__}'


def nodes(cfg: fdl.Buildable, root: str = 'task') -> Iterator[Node]:
  """Yields the values of a config, sorted by argument names; each config before what it holds.

  Lists and dicts that hold configs are no values: their items are.
  """

  def visit(node: Node) -> Iterator[Node]:
    value, parts = node.value, []
    if isinstance(value, list | tuple):
      parts = [Node(f'{node.path}[{i}]', x, value, i) for i, x in enumerate(value)]
    if isinstance(value, dict):
      parts = [Node(f'{node.path}.{name}', x, value, name) for name, x in value.items()]
    if node.is_config:
      held = value.__arguments__
      parts = [Node(f'{node.path}.{name}', held[name], value, name) for name in sorted(held)]
    if node.is_config or not any(part.is_config for part in parts):
      yield node
    if node.is_config or any(part.is_config for part in parts):
      for part in parts:
        yield from visit(part)

  return visit(Node(root, cfg))


def apart(value: Any) -> Any:
  """Returns a copy of a config in which no two paths share one, so that each is edited alone."""
  if isinstance(value, fdl.Buildable):
    copied = copy.copy(value)
    for name, held in value.__arguments__.items():
      setattr(copied, str(name), apart(held))
    return copied
  if type(value) in (list, tuple):
    return type(value)(map(apart, value))
  return {key: apart(x) for key, x in value.items()} if isinstance(value, dict) else value


def config_text(cfg: fdl.Buildable, root: str = 'task') -> str:
  """A config as text: one `path = value` per line, classes included, sorted by argument names.

  A run writes this text, and two experiments are compared by it. Fiddle's own flattened print
  leaves out the class that a template makes.
  """
  return '\n'.join(map(str, nodes(cfg, root)))


def _with_children(cfg: _B, cls: Callable[..., object]) -> _B:
  """Sets arguments to their defaults, children as templates, so a printed config is complete."""
  if not dataclasses.is_dataclass(cls):
    return cfg
  for field in dataclasses.fields(cls):
    if field.name in cfg.__arguments__ or field.name in ('parent', 'name'):
      continue
    child = field.metadata.get(_METADATA_KEY)
    if child is not None:
      setattr(cfg, field.name, template(child))
    elif field.default is not dataclasses.MISSING and not callable(field.default):
      setattr(cfg, field.name, field.default)
  return cfg
