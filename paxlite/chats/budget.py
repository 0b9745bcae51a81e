"""Limits what an untrusted chat template may cost.

The cost is in characters and steps, and is counted before each operation is done. The docstring of
chat_template.py says what is counted where.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

BUDGET = 1 << 27  # characters and steps: a few seconds, and at most half a gigabyte

_ELEMENT = 48  # cost of an element of a list, in characters
_PIECE = 16  # a character that may become an element, or that Python does more with than copy
_COMPARED = 16  # pairs of characters that Python compares in a step
# From this length on, a forward search takes a time that is linear in the text.
_LINEAR_SEARCH = 30_000
NODE = 8  # cost of a node of the syntax tree
_CALL = 64  # cost of a call of a filter, a test or a method
BODY = 512  # cost of a macro or a block, in addition to its nodes
_INT_BITS = 4096
_MAX_PRECISION = 100


def _names(text: str) -> frozenset[str]:
  return frozenset(text.split())


# The methods that can be called, by the type that has them.
METHODS: dict[type[Collection], frozenset[str]] = {
  str: _names(
    'capitalize casefold center count endswith find format format_map index isalnum isalpha isascii'
    ' isdecimal isdigit isidentifier islower isnumeric isspace istitle isupper join ljust lower'
    ' lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit'
    ' rstrip split splitlines startswith strip swapcase title upper zfill'
  ),
  dict: _names('copy get items keys values'),
  list: _names('copy count index'),
  tuple: _names('count index'),
}
_VIEWS = _names('get items keys values')
# Methods that look for a text, and those that may compare it with every place of a long text:
# searches from the end have no fast algorithm, and each stripped character is looked up.
_SEARCHES = _names('count find index partition replace split')
_QUADRATIC = _names('lstrip rfind rindex rpartition rsplit rstrip strip')
# Filters that do not copy the contents of their value.
_BY_REFERENCE = _names('attr count d default first items last length list reverse safe')
_LAZY = _names('map reject rejectattr select selectattr')
# Filters that do more with a character than copy it.
_HEAVY = _names(
  'batch dictsort e escape forceescape groupby indent max min slice sort sum title truncate unique'
  ' urlencode wordcount'
)
# `random` is left out because a text must be the same whenever it is written.
_LEFT_OUT = _names('pprint random striptags urlize wordwrap xmlattr')
_DEEP_TESTS = _names(
  '!= < <= == > >= divisibleby eq equalto ge greaterthan gt in le lessthan lower lt ne upper'
)


_T = TypeVar('_T')


class TooMuch(Exception):
  """Raised when a rendering costs more than its budget."""

  def __init__(self, what: str = 'it computes or writes far more than a conversation needs'):
    super().__init__(what)


class Budget:
  """The characters and steps that a rendering has left."""

  def __init__(self) -> None:
    self.left = BUDGET

  def pay(self, cost: int) -> bool:
    """Subtracts `cost`; returns True, so that a condition can begin with this call."""
    self.left -= cost
    if self.left < 0:
      raise TooMuch
    return True

  def whole(self, value: _T) -> _T:
    """Pays for reading every part of `value`, as often as the part occurs; returns `value`."""
    self.pay(self.size(value))
    return value

  def outer(self, value: _T) -> _T:
    """Pays for reading the elements of `value`, but not their contents; returns `value`."""
    if isinstance(value, str):
      self.pay(len(value))
    elif isinstance(value, Collection):
      self.pay(_ELEMENT * len(value))
    return value

  def searched(self, value: _T) -> _T:
    """Pays for a search in `value`; returns `value`. A search in a dictionary is free.

    In a chain of comparisons, which alone calls this, it is not known what is searched for.
    """
    if isinstance(value, str):
      self.pay(_PIECE * _PIECE * len(value))
    return value if isinstance(value, dict) else self.whole(value)

  def contains(self, needle: object, value: Any) -> bool:
    """Pays for `needle in value`, and returns it."""
    self.whole(needle)
    if not isinstance(value, dict):
      self.whole(value)
    if isinstance(value, str):
      self.compared(value, 'find', [needle])
    return needle in value

  def compared(self, text: str, method: str, given: Iterable[object]) -> None:
    """Pays for the comparisons of a text with those `given` that `method` looks for in it."""
    if method in _QUADRATIC or (method in _SEARCHES and len(text) < _LINEAR_SEARCH):
      longest = max((len(x) for x in given if isinstance(x, str)), default=0)
      self.pay(len(text) * longest // _COMPARED)

  def counted(self, values: Iterable[_T]) -> Iterator[_T]:
    """Yields `values` and pays for each one as it is read."""
    for value in values:
      self.pay(4 * _ELEMENT)
      yield value

  def size(self, value: object) -> int:
    """Returns the cost of the characters and elements in a value.

    Contents that the value has several times are counted each time.
    """
    if type(value) is str:
      return len(value)
    if value is None or isinstance(value, bool | float):
      return 0
    todo: list[Any] = [value]  # templates make values of any type
    total = 0
    while todo:
      inner = todo.pop()
      if isinstance(inner, str):
        total += len(inner)
      elif isinstance(inner, int):
        if inner.bit_length() > _INT_BITS:
          raise TooMuch(f'it computes with a number of more than {_INT_BITS} bits')
      elif isinstance(inner, range):
        total += _ELEMENT * len(inner)
      elif isinstance(inner, Mapping):
        total += 2 * _ELEMENT * len(inner)
        todo += [*inner.keys(), *inner.values()]
      elif isinstance(inner, Collection):
        total += _ELEMENT * len(inner)
        todo += inner
      elif type(inner).__name__ == 'Namespace':
        total += _ELEMENT
        todo.append(inner._Namespace__attrs)
      if total > self.left:
        raise TooMuch
    return total

  def operator(self, name: str, left: object, right: object) -> None:
    """Pays for `left + right`, `-`, `*`, `%` or `**`."""
    if isinstance(left, int) and isinstance(right, int):
      bits = left.bit_length() + right.bit_length()
      if name == '**':
        bits = left.bit_length() * max(right, 0)
      if bits > _INT_BITS and name != '%':
        raise TooMuch(f'it computes with a number of more than {_INT_BITS} bits')
    elif name == '*':
      for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, Collection):
          each = 1 if isinstance(many, str) else _ELEMENT
          self.pay(each * len(many) * max(times, 0))
    elif name == '%' and isinstance(left, str):
      self.formatted(left, right)
    else:
      self.outer(left)
      self.outer(right)

  def formatted(self, form: str, arguments: object) -> None:
    """Pays for formatting a text; widths of its fields may be numbers in it or arguments."""
    widths = sum(min(int(digits[:18]), BUDGET + 1) for digits in re.findall(r'\d+', form))
    fields = 1 + form.count('{') + form.count('%')
    if '*' in form or re.search(r':[^{}]*\{', form):
      inner = arguments if isinstance(arguments, tuple | list) else [arguments]
      widths += fields * sum(abs(x) for x in _integers(inner))
    self.pay(len(form) + widths + fields * (_ELEMENT + self.size(arguments)))

  def replaced(self, text: str, old: object, new: object, *_: object) -> None:
    self.pay(len(text))
    self.compared(text, 'replace', [old])
    self.pay(text.count(str(old)) * len(str(new)))

  def method(self, owner: Collection, name: str, args: tuple, kwargs: Mapping[str, object]) -> None:
    """Pays for a method of a text, a list or a dictionary."""
    if name in _VIEWS:
      self.pay(_CALL)
      return
    self.pay(_CALL + self.size(owner))
    if args or kwargs:
      self.whole([args, kwargs])
    if isinstance(owner, str):
      self.compared(owner, name, [*args, *kwargs.values()])
    if name in ('center', 'ljust', 'rjust', 'zfill'):
      self.pay(max(_integers(args), default=0))
    elif name in ('partition', 'rpartition', 'rsplit', 'split', 'splitlines', 'title'):
      self.pay(_PIECE * len(owner))
    elif name == 'replace':
      self.replaced(str(owner), *args)
    elif name == 'join' and args:
      self.pay(len(owner) * (len(args[0]) if isinstance(args[0], Collection) else 0))
    elif name in ('format', 'format_map'):
      self.formatted(str(owner), [*args, *kwargs.values()])


def _integers(values: Iterable[object]) -> Iterator[int]:
  for value in values:
    if isinstance(value, int):
      yield value
    elif isinstance(value, Mapping):
      yield from (x for x in value.values() if isinstance(x, int))


def _filter(budget: Budget, name: str, call: Callable[..., object]) -> Callable[..., object]:
  """Wraps a filter of Jinja's so that it pays for its cost.

  Some filters take a context or an environment as their first argument.
  """
  at = int(hasattr(call, 'jinja_pass_arg'))  # position of the value among the arguments

  def lazy(*args: Any, **kwargs: object) -> object:
    budget.pay(_CALL)
    return call(*args[:at], budget.counted(args[at]), *args[at + 1 :], **kwargs)

  def by_reference(*args: Any, **kwargs: object) -> object:
    copied = name in ('list', 'reverse') and isinstance(args[at], Collection)
    budget.pay(_CALL + (_ELEMENT * len(args[at]) if copied else 0))
    return call(*args, **kwargs)

  def paying(*args: Any, **kwargs: object) -> object:
    value = args[at]
    if name in ('join', 'sum') and not isinstance(value, Collection):
      value = list(value)
      args = (*args[:at], value, *args[at + 1 :])
    budget.pay(_CALL + budget.size(value) * (_PIECE if name in _HEAVY else 1))
    if len(args) > at + 1 or kwargs:
      given = [*args[at + 1 :], *kwargs.values()]
      budget.whole(given)
      _pay_for_growth(budget, name, value, given)
    elif name == 'indent':
      _pay_for_growth(budget, name, value, [])
    result = call(*args, **kwargs)
    budget.pay(len(result) if type(result) is str else budget.size(result))
    return result

  chosen = lazy if name in _LAZY else by_reference if name in _BY_REFERENCE else paying
  return functools.wraps(call)(chosen)


def _pay_for_growth(budget: Budget, name: str, value: Any, given: list[object]) -> None:
  """Pays for the output that a filter's other arguments add to its value."""
  if name in ('batch', 'center', 'slice'):
    budget.pay(max(_integers(given), default=0))
  elif name == 'format':
    budget.formatted(str(value), given)
  elif name == 'indent':
    wide = max([4, *_integers(given), *(len(x) for x in given if isinstance(x, str))])
    budget.pay(wide * (1 + len(str(value).splitlines())))
  elif name == 'join':
    between = max((len(x) for x in given if isinstance(x, str)), default=0)
    budget.pay(between * len(value))
  elif name == 'replace':
    budget.replaced(str(value), *[*given, '', ''][:2])
  elif name == 'round' and any(abs(x) > _MAX_PRECISION for x in _integers(given)):
    raise TooMuch(f'it rounds to more than {_MAX_PRECISION} places')
  elif name == 'trim':
    budget.compared(str(value), 'strip', given)
  elif name == 'sum' and any(isinstance(x, Collection) for x in given):
    budget.pay(len(value) * budget.size(value))


def _test(budget: Budget, name: str, call: Callable[..., object]) -> Callable[..., object]:
  if name == 'in':
    return budget.contains
  at = int(hasattr(call, 'jinja_pass_arg'))

  def paying(*args: object, **kwargs: object) -> object:
    for value in (*args[at:], *kwargs.values()):
      budget.whole(value)
    budget.pay(_CALL)
    return call(*args, **kwargs)

  return functools.wraps(call)(paying)


def _tojson(budget: Budget) -> Callable[..., str]:
  """Returns the tojson filter of transformers, which escapes nothing for HTML."""

  def tojson(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    between = sum(map(len, separators or ()))
    budget.pay((4 + between) * budget.size(x))
    if indent is None:
      return json.dumps(x, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    wide = indent if isinstance(indent, int) else len(indent)
    if wide > _MAX_PRECISION:
      raise TooMuch(f'it indents by more than {_MAX_PRECISION}')
    encoder = json.JSONEncoder(
      ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces = []
    for piece in encoder.iterencode(x):
      budget.pay(_ELEMENT + len(piece))
      pieces.append(piece)
    return ''.join(pieces)

  return tojson


def filters(
  budget: Budget, known: Mapping[str, Callable[..., object]]
) -> dict[str, Callable[..., object]]:
  """Returns the Jinja filters that chats can use, with transformers' tojson."""
  paying = {k: _filter(budget, k, f) for k, f in known.items() if k not in _LEFT_OUT}
  return paying | {'tojson': _tojson(budget)}


def tests(
  budget: Budget, known: Mapping[str, Callable[..., object]]
) -> dict[str, Callable[..., object]]:
  """Returns Jinja's tests; those that only look at a type cost nothing."""
  return {k: _test(budget, k, f) if k in _DEEP_TESTS else f for k, f in known.items()}


def added(budget: Budget, first: Any, *others: Any) -> Any:
  """Pays for first + … + last and returns it."""
  for other in others:
    if type(first) is type(other) is str:
      budget.pay(len(first) + len(other))
    else:
      budget.operator('+', first, other)
    first = first + other
  return first
