"""Fingerprints of the user's functions and classes in the configs of an experiment.

A config names a layer or a loss, and does not hold its code. A class whose arguments are dotted
paths of code, as those of rewards, lists these arguments in `named_code`. Comments, docstrings and
formatting change no fingerprint.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import sys
import textwrap
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import fiddle as fdl
from fiddle import daglish

from paxlite.cli.user_code import is_own
from paxlite.cli.user_modules import import_named
from paxlite.compilation.versions import code_of_paxlite
from paxlite.config.attributes import Attributes
from paxlite.core.json_text import JsonObject

SOURCES = 'sources.json'  # in the folder of a run
COMPARED = 'task', 'train_input'  # the configs that decide what is trained

_Defined = type | types.FunctionType
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Constant(NamedTuple):
  """A value of a module, or what it is made of."""

  module: str
  name: str


def recorded(cfgs: Mapping[str, fdl.Buildable]) -> JsonObject:
  """Returns what sources.json holds: fingerprints of paxlite's code and of the user's.

  Args:
    cfgs: The configs of an experiment by name.
  """
  found = sources(cfg for name, cfg in cfgs.items() if name in COMPARED)
  return {'paxlite': code_of_paxlite(), 'user': {name: x for name, (x, _) in found.items()}}


def sources(cfgs: Iterable[fdl.Buildable]) -> dict[str, tuple[str, str]]:
  """Returns a fingerprint of each function, method, class and constant of the user's in configs.

  What they use of the user's modules belongs to them: base classes, helpers, and values such as
  numbers, dictionaries and objects, with the classes of these. A class stands for its fields and
  the names of its methods. A value stands for the statements that assign or change it, because a
  time or a count of cores differs at each start. What has no source that can be read, as in an
  interpreter, is left out.

  Args:
    cfgs: The configs.

  Returns:
    (fingerprint, place) by the dotted name; a place is 'FILE, line N'.
  """
  found: dict[str, tuple[str, str]] = {}
  todo: list[_Defined | _Constant] = [x for cfg in cfgs for x in _defined_in(cfg)]
  seen = set()
  while todo:
    x = todo.pop()
    module = sys.modules.get(x.module if isinstance(x, _Constant) else x.__module__)
    file = getattr(module, '__file__', None) or '<'
    if module is None or x in seen or not is_own(file):
      continue
    if isinstance(x, type) and issubclass(x, Attributes):
      continue
    seen.add(x)
    try:
      name, tree, before = _read(x, module)
    except (OSError, TypeError, SyntaxError):
      continue
    if isinstance(x, _Constant):
      todo += _imported(x.name, module)
    elif isinstance(x, type):
      todo += x.__bases__
    todo += _used(tree, module)
    for part, node in _parts(name, tree):
      found[part] = _fingerprint(_shape(node)), f'{file}, line {before + node.lineno}'
  return found


def _defined_in(cfg: fdl.Buildable) -> Iterator[_Defined | _Constant]:
  for value, _ in daglish.iterate(cfg):
    called = fdl.get_callable(value) if isinstance(value, fdl.Buildable) else value
    yield from _definition(called)
    for name in getattr(called, 'named_code', ()) if called is not value else ():
      named = getattr(value, name)
      for path in [named] if isinstance(named, str) else named:
        yield from _named(path)


def _named(path: str) -> Sequence[_Defined | _Constant]:
  """Returns what a dotted path names; [] if it does not exist, which the caller reports."""
  module, _, name = path.rpartition('.')
  try:
    value = getattr(import_named(module), name)
  except Exception:  # whatever a module of the user raises
    return []
  return _definition(value) or [_Constant(module, name)]


def _definition(value: object) -> list[_Defined]:
  """Returns the class or the function that a value is, or wraps, as jax.jit does; [] if none."""
  while isinstance(value, functools.partial):
    value = value.func
  if callable(value):
    value = inspect.unwrap(getattr(value, '__func__', value))
  return [value] if isinstance(value, _Defined) else []


def _read(x: _Defined | _Constant, module: types.ModuleType) -> tuple[str, ast.stmt, int]:
  """Returns the dotted name, the syntax tree, and the number of lines before it."""
  if isinstance(x, _Constant):
    return '.'.join(x), _together(_assignments(x.name, module)), 0
  lines, first = inspect.getsourcelines(x)
  tree = ast.parse(textwrap.dedent(''.join(lines))).body[0]
  return f'{x.__module__}.{x.__qualname__}', tree, first - 1


def _assignments(name: str, module: types.ModuleType) -> list[ast.stmt]:
  """Returns the statements of a module, outside functions, that assign a name or change its value.

  The value changes by `name[…] = …`, `name.x = …` and calls whose result is not used.
  """
  body = _parsed(inspect.getsource(module)).body
  return [
    node
    for node in body
    if not isinstance(node, _Function | ast.ClassDef) and name in _changed_names(node)
  ]


def _changed_names(statement: ast.stmt) -> set[str]:
  """Returns the names that a statement, or one within it, assigns, or whose value it may change."""
  found = set()
  for node in ast.walk(statement):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      found.add(node.id)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
      targets = [node.value.func]
    else:
      continue
    found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
  return found


def _imported(name: str, module: types.ModuleType) -> Iterator[_Constant]:
  """Yields what a module may have imported under a name."""
  nodes = ast.walk(_parsed(inspect.getsource(module)))
  for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
    for alias in node.names:
      if name == (alias.asname or alias.name) or alias.name == '*':
        source = '.' * node.level + (node.module or '')
        with contextlib.suppress(ImportError):  # one that failed, such as a relative one
          source = importlib.util.resolve_name(source, module.__package__)
          yield _Constant(source, name if alias.name == '*' else alias.name)


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> ast.Module:
  return ast.parse(source)


def _parts(name: str, tree: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
  """Yields the methods of a class, and what is left of it; of a function, the function."""
  if isinstance(tree, ast.ClassDef):
    methods: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
      if isinstance(node, _Function):
        methods.setdefault(node.name, []).append(node)
    for method, nodes in methods.items():  # a property has several functions of one name
      yield f'{name}.{method}', nodes[0] if len(nodes) == 1 else _together(nodes)
    rest = [node for node in tree.body if not isinstance(node, _Function)]
    named: list[ast.stmt] = [ast.Expr(ast.Name(method)) for method in methods]
    tree = ast.ClassDef(**{**vars(tree), 'body': [*rest, *named]})
  yield name, tree


def _together(nodes: list[ast.stmt]) -> ast.stmt:
  return ast.If(ast.Constant(True), nodes, [], lineno=nodes[0].lineno if nodes else 1)


def _shape(node: object) -> object:
  """Returns a syntax tree as nested tuples without docstrings and places.

  Empty fields are left out, because each version of Python has others.
  """
  if isinstance(node, list):
    return tuple(map(_shape, node))
  if not isinstance(node, ast.AST):
    return repr(node)
  fields = dict(ast.iter_fields(node))
  if isinstance(node, _Function | ast.ClassDef):
    is_text = lambda x: isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
    fields['body'] = [x for x in node.body if not is_text(x)]
  return type(node).__name__, *((k, _shape(x)) for k, x in fields.items() if x not in (None, []))


def _used(tree: ast.stmt, module: types.ModuleType) -> Iterator[_Defined | _Constant]:
  """Yields what a statement uses of its module, and of modules that this one has imported."""
  for node in ast.walk(tree):
    owner: types.ModuleType | None = module
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
      name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      owner, name = vars(module).get(node.value.id), node.attr
    else:
      continue
    if not isinstance(owner, types.ModuleType) or not hasattr(owner, name):
      continue
    value = getattr(owner, name)
    yield from (found := _definition(value))
    is_assigned = any(x.__qualname__ != name for x in found)  # as what a function has returned
    if not isinstance(value, types.ModuleType) and (not found or is_assigned):
      yield _Constant(owner.__name__, name)


def _fingerprint(value: object) -> str:
  return f'{zlib.crc32(repr(value).encode()):08x}'
