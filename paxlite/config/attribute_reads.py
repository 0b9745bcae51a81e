"""Which attributes of an object a call reads."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from paxlite.config.attributes import Attributes

_A = TypeVar('_A', bound=Attributes)


def reads_of(owner: _A, call: Callable[[_A], object]) -> set[str]:
  """Returns the names of the attributes and methods that a call reads from an object.

  Args:
    owner: The object. A copy of it, which notes what is read, is passed to the call.
    call: The call, such as `lambda e: e.optimizer()`.
  """
  found: set[str] = set()
  cls: Any = type(owner)

  def read(self: _A, name: str) -> object:
    found.add(name)
    return cls.__getattribute__(self, name)

  names = {'__module__': cls.__module__, '__qualname__': cls.__qualname__}
  noting = copy.copy(owner)
  noting.__class__ = type(cls.__name__, (cls,), {'__getattribute__': read, **names})
  found.clear()
  call(noting)
  return found
