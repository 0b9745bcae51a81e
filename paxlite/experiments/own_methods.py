"""Checks what the methods of an experiment return, which users override."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import fiddle as fdl

from paxlite.cli.user_code import place_of
from paxlite.config.templates import selections_named
from paxlite.core.errors import UserError
from paxlite.tracking.writers import Writer
from paxlite.training.callbacks import Callback


class _Returned(NamedTuple):
  """A method's return type: its description, its check, and a hint at common mistakes."""

  described: str
  fits: Callable[[object], bool]
  hint: str = ''


def _is_config(x: object) -> bool:
  return isinstance(x, fdl.Buildable)


def _are_configs(x: object) -> bool:
  return isinstance(x, Mapping) and all(map(_is_config, x.values()))


def _are(kind: type) -> Callable[[object], bool]:
  return lambda x: isinstance(x, list | tuple) and all(isinstance(c, kind) for c in x)


_CONFIG = (
  ': write paxlite.config.templates.config(FUNCTION, ARGUMENT=VALUE) in place of '
  'FUNCTION(ARGUMENT=VALUE)'
)
_KINDS = {
  'task': _Returned('the fdl.Config of a Task', _is_config, _CONFIG),
  'model': _Returned('the fdl.Config of a TransformerLm', _is_config, _CONFIG),
  'losses': _Returned('a dict of the fdl.Config of losses by name', _are_configs, _CONFIG),
  'reference': _Returned(
    'the fdl.Config of a Reference, or None', lambda x: x is None or _is_config(x), _CONFIG
  ),
  'transformation': _Returned('the fdl.Config of an optax transformation', _is_config, _CONFIG),
  'train_input': _Returned('the fdl.Config of an Input', _is_config, _CONFIG),
  'eval_inputs': _Returned('a dict of fdl.Config by name', _are_configs, _CONFIG),
  'callbacks': _Returned('a list of paxlite.Callback', _are(Callback)),
  'trackers': _Returned('a list of paxlite.tracking.writers.Writer', _are(Writer)),
}


_FORMER = {'remarks': 'warnings'}  # properties and methods that have another name now


def check_overrides(cls: type, base: type) -> None:
  """Adds a check to each method of a user that a class overrides, or gets from a mixin.

  Raises UserError if the class defines what has another name now.

  Args:
    cls: The class of an experiment.
    base: The base class of all experiments.
  """
  bases = [b for b in cls.__mro__[1:] if issubclass(b, base)]
  is_new = lambda name: all(vars(b).get(name) is not getattr(cls, name, None) for b in bases)
  is_ours = lambda name: str(getattr(cls, name).__module__).startswith('paxlite.')
  for name, kind in _KINDS.items():
    if hasattr(cls, name) and is_new(name) and not is_ours(name):
      setattr(cls, name, _checked(getattr(cls, name), kind))
  for name, now in _FORMER.items():
    if name in vars(cls):  # nothing would ask it
      raise UserError(f'{cls.__name__}.{name} is now called {now}: rename it')
  if any('optimizer' in vars(b) for b in bases) and is_new('optimizer'):
    cls.optimizer = _refused(cls.optimizer)  # type: ignore[attr-defined]


def _refused(method: Callable[..., Any]) -> Callable[..., Any]:
  def refused(self: object) -> Any:
    raise UserError(
      f"{place_of(method)}: {method.__qualname__} is paxlite's own: override transformation(), "
      'which returns the config of an optax transformation'
    )

  return refused


def _checked(method: Callable[..., Any], kind: _Returned) -> Callable[..., Any]:
  @functools.wraps(method)
  def checked(self: object, *args: object, **kwargs: object) -> Any:
    with selections_named(type(self).__name__):
      found = method(self, *args, **kwargs)
    if not kind.fits(found):
      made = 'nothing' if found is None else f'an object of the type {type(found).__name__}'
      raise UserError(
        f'{place_of(method)}: {method.__qualname__} returns {made}, and must return '
        f'{kind.described}{kind.hint if found is not None else ""}'
      )
    return found

  return checked
