"""paxlite families [TEXT]

Prints the model families that `paxlite import` reads: model_type in config.json, experiments and
special features. TEXT selects those with it in one of these, or that read a config.json key of that
name; for a single family, its keys are printed too.

Examples:
  paxlite families
  paxlite families qwen3_moe
"""

import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paxlite.cli.parser import Parser
from paxlite.core.errors import UserError

PARSER = Parser(__doc__)
PARSER.word('text', 'TEXT', 'part of a name or description, or a key', required=False)


class Row(NamedTuple):
  """The table row of families that share an experiment class."""

  types: list[str]  # their values of model_type, and others that mean the same
  experiments: list[str]  # the names of the class's sizes; that of the class itself if it has none
  special: str  # the first paragraph of its docstring
  keys: dict[str, list[str]]  # the keys of config.json that they read, by model_type


def main(argv: Sequence[str]) -> None:
  text = (PARSER.parsed(argv).text or '').lower()
  known = rows()
  found = [r for r in known if text in r.types] or [r for r in known if _has(r, text)]
  if not found:
    raise UserError(f'no family has or reads {text!r}: paxlite families lists them all')
  for row in found:
    print(f'{", ".join(row.types)}: {row.special}')
    print(_indented(', '.join(row.experiments)))
  if len(found) == 1:
    for name, keys in found[0].keys.items():
      print(_indented(f'{name} reads: {", ".join(keys)}'))


def rows() -> list[Row]:
  """Returns a row for each class of experiments that is published, the simplest one first."""
  from paxlite.weights.family_tables import FAMILIES, OTHER_TYPES

  found: dict[type, Row] = {}
  for name, family in FAMILIES.items():
    cls = family.experiment
    row = found.setdefault(cls, Row([], _sizes(cls) or [cls.__name__], _special(cls), {}))
    row.types.extend([name, *(other for other, usual in OTHER_TYPES.items() if usual == name)])
    row.keys[name] = [*dict.fromkeys(their for key in family.keys for their in key.theirs)]
  return [*found.values()]


def table() -> str:
  """Returns the families as a table of docs/weights.md."""
  lines = [f'| {code(r.types)} | {code(r.experiments)} | {r.special} |' for r in rows()]
  return '\n'.join(['| model_type | experiments | what is special |', '|---|---|---|', *lines])


def keys_table() -> str:
  """Returns the families that read each key of config.json as a table of docs/keys_of_models.md."""
  read = {name: keys for row in rows() for name, keys in row.keys.items()}
  by_key: dict[str, list[str]] = {}
  for name, keys in read.items():
    for key in keys:
      by_key.setdefault(key, []).append(name)
  shown = {k: 'all' if len(v) == len(read) else ', '.join(v) for k, v in sorted(by_key.items())}
  return f'| key | families |\n|---|---|\n{grouped(shown)}'


def grouped(found: Mapping[str, str]) -> str:
  """Returns rows of a table, in which names with the same right side share one."""
  by_text: dict[str, list[str]] = {}
  for name, text in found.items():
    by_text.setdefault(text, []).append(name)
  return ''.join(f'| {code(names)} | {text} |\n' for text, names in by_text.items())


def code(names: Iterable[str]) -> str:
  return ', '.join(f'`{name}`' for name in names)


def _has(row: Row, text: str) -> bool:
  said = ' '.join([*row.types, *row.experiments, row.special]).lower()
  return text in said or any(text in keys for keys in row.keys.values())


def _indented(text: str) -> str:
  return textwrap.fill(text, 96, initial_indent='    ', subsequent_indent='    ')


def _sizes(cls: type) -> list[str]:
  """Returns the names of the experiments whose closest published class is `cls`."""
  from paxlite.experiments.registry import experiments, has_data
  from paxlite.weights.family_tables import FAMILIES

  published = {family.experiment for family in FAMILIES.values()}
  closest = lambda size: next((c for c in size.__mro__ if c in published), None)
  return [name for name, c in experiments().items() if closest(c) is cls and not has_data(c)]


def _special(cls: type) -> str:
  """Returns the first paragraph of a docstring, without the command that registered ones have."""
  paragraphs = (inspect.getdoc(cls) or '').split('\n\n')
  return ' '.join(next(p for p in paragraphs if not p.startswith('python -m ')).split())
