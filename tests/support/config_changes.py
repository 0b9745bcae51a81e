"""What differs between two built configs, as lines `path = value` and `path: class`.

A template of another class is compared with the defaults of its class, and equal parts of a list
share their lines. So that a reviewer reads what somebody chose, and each default once.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import fiddle as fdl

from paxlite.config.templates import config_text, template

NOTHING = object()  # in place of what one of the two configs does not have


def changes(path: str, old: object, new: object) -> Iterator[str]:
  """Yields lines for all in which `new` differs from `old`; NOTHING stands for no config."""
  if isinstance(new, fdl.Buildable):
    if made(new) != made(old):
      yield f'{path}: {made(new)}'
      old = template(fdl.get_callable(new))
    yield from _of_arguments(path, old, new)
  elif (parts := _parts(new)) and any(isinstance(x, fdl.Buildable) for x in parts.values()):
    yield from _of_parts(path, _parts(old), parts)
  elif new is NOTHING:
    yield f'{path} is not there'
  elif old is NOTHING or isinstance(old, fdl.Buildable) or repr(old) != repr(new):
    yield f'{path} = {new!r}'


def together(lines: Iterable[str]) -> Iterator[str]:
  """Yields lines, those that say the same of several paths as one: the places, then `: what`."""
  places: dict[str, list[str]] = {}
  for line in lines:
    path, what = re.match(r'(.*?)((?:\.\w+)?(?: = |: | is ).*)', line, re.DOTALL).groups()
    places.setdefault(what, []).append(path)
  for what, paths in places.items():
    if len(paths) == 1:
      yield f'{paths[0]}{what}'
      continue
    columns = zip(*(path.split('.')[:-1] for path in paths), strict=False)
    common = itertools.takewhile(lambda column: len({*column}) == 1, columns)
    root = ''.join(f'{column[0]}.' for column in common)
    yield f'{root}{{{", ".join(path.removeprefix(root) for path in paths)}}}{what}'


def made(value: object) -> str:
  """Returns what a config or a template makes; '' for anything else."""
  if not isinstance(value, fdl.Buildable):
    return ''
  kind = 'template of ' if isinstance(value, fdl.Partial) else ''
  return f'{kind}{name_of(fdl.get_callable(value))}'


def name_of(function: object) -> str:
  return f'{function.__module__}.{function.__qualname__}'


def classes(value: object) -> Iterator[object]:
  """Yields what the configs and templates of a tree make."""
  if isinstance(value, fdl.Buildable):
    yield fdl.get_callable(value)
    parts = value.__arguments__
  else:
    parts = _parts(value)
  for part in parts.values():
    yield from classes(part)


def defaults(made_class: object) -> Iterator[str]:
  """Yields the defaults of a class of templates; the defaults of its children are theirs."""
  for name, value in sorted(template(made_class).__arguments__.items()):
    text = f': {made(value)}' if isinstance(value, fdl.Buildable) else f' = {value!r}'
    yield f'{name_of(made_class)}.{name}{text}'


def _of_arguments(path: str, old: fdl.Buildable, new: fdl.Buildable) -> Iterator[str]:
  before, after = old.__arguments__, new.__arguments__
  for name in sorted({*before, *after}):
    yield from changes(f'{path}.{name}', before.get(name, NOTHING), after.get(name, NOTHING))


def _parts(value: object) -> Mapping[object, object]:
  if isinstance(value, Mapping):
    return value
  return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _of_parts(
  path: str, old: Mapping[object, object], new: Mapping[object, object]
) -> Iterator[str]:
  text = lambda part: config_text(part) if isinstance(part, fdl.Buildable) else repr(part)
  if [(k, text(x)) for k, x in old.items()] == [(k, text(x)) for k, x in new.items()]:
    return
  yield from (f'{path}[{key}] is not there' for key in old if key not in new)
  equal: dict[str, list[object]] = {}
  for key, part in new.items():
    equal.setdefault(text(part), []).append(key)
  before = next(iter(old.values()), NOTHING)
  for keys in equal.values():
    part = new[keys[0]]
    whole = f'{path}[{_joined(keys)}]'
    # each part is named, even if it is what the former one is
    yield f'{whole}: {made(part)}' if isinstance(part, fdl.Buildable) else f'{whole} = {part!r}'
    heads = f'{whole}: ', f'{whole} = '
    yield from (x for x in changes(whole, before, part) if not x.startswith(heads))
    before = part


def _joined(keys: Sequence[object]) -> str:
  """Returns numbers as 0-3,5 and names apart by commas."""
  runs: list[list[object]] = []
  for key in keys:
    if runs and isinstance(key, int) and key == runs[-1][-1] + 1:
      runs[-1][1:] = [key]
    else:
      runs.append([key])
  return ','.join('-'.join(map(str, run)) for run in runs)
