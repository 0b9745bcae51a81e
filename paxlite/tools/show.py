"""paxlite show EXPERIMENT [--path=PATH] [NAME=VALUE …]

Prints an experiment's values by subject, with their meanings, and the config built from them; with
--path, what the config has there.

Examples:
  paxlite show GPT126M NUM_LAYERS=24
  paxlite show GPT126M --path=task.optimizer
"""

import ast
import contextlib
import functools
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from paxlite.cli.parser import Parser, experiment_name
from paxlite.core.errors import UserError

if TYPE_CHECKING:
  from paxlite.experiments.base import Experiment


PARSER = Parser(__doc__)
PARSER.word('fdl_config', 'EXPERIMENT', 'bare name or dotted path', experiment_name)
PARSER.option('--path', 'place in the built config, as task.model')
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  if args.path is None:
    print(text(args.fdl_config, args.attributes, explained=True))
  else:
    print(built(args.fdl_config, args.attributes, args.path))


def built(name: str, overrides: dict[str, str], path: str) -> str:
  """Returns what the built config of an experiment has at a path, one value on each line."""
  from paxlite.config.edits import find
  from paxlite.experiments.description import configs
  from paxlite.programs.launch import build_experiment

  cfgs = configs(build_experiment(name, [], overrides))
  root = next((root for root in cfgs if f'{path}.'.startswith(f'{root}.')), 'task')
  return '\n'.join(map(str, find(cfgs[root], path, root)))


def text(name: str, overrides: dict[str, str], explained: bool = False) -> str:
  """Returns the values of an experiment and its built config, one on each line."""
  from paxlite.experiments.description import configs_text, values_text
  from paxlite.programs.launch import build_experiment

  experiment = build_experiment(name, [], overrides)
  values = values_text(experiment)
  if explained:
    known = meanings(type(experiment).declaring())
    values = _by_subject(type(experiment), values, lambda line: _explained(line, known))
  found = values + '\n' + configs_text(experiment)
  return '\n'.join([found, *(f'# {r}' for r in _warnings(experiment))]) if explained else found


def _by_subject(cls: type['Experiment'], values: str, explained: Callable[[str], str]) -> str:
  """Returns the lines of the values below the subjects of their attributes."""
  first, lines, groups = [], values.split('\n'), {s: [f'\n## {s}'] for s in cls.subjects()}
  for line in lines:
    name, is_value, _ = line.partition(' = ')
    if is_value and name.isupper():
      groups[cls.subject_of(name)].append(explained(line))
    elif line:
      first.append(line)
  shown = [line for group in groups.values() if len(group) > 1 for line in group]
  return '\n'.join([*first, *shown, ''])


def _warnings(experiment: 'Experiment') -> list[str]:
  """Returns sentences about values that are unusual, or that the experiment's optimizer ignores."""
  with contextlib.suppress(UserError):
    return experiment.warnings
  return []


def _explained(line: str, meanings: dict[str, str]) -> str:
  meaning = meanings.get(line.partition(' = ')[0])
  if not meaning:
    return line
  explained = f'{line}  # {meaning}'
  is_narrow = sys.stdout.isatty() or 'COLUMNS' in os.environ
  width = shutil.get_terminal_size((0, 0)).columns if is_narrow else 0
  if not width or len(explained) <= width:
    return explained
  start = '    # '
  below = textwrap.wrap(meaning, max(20, width), initial_indent=start, subsequent_indent=start)
  return '\n'.join([line, *below])


def meanings(classes: Iterable[type]) -> dict[str, str]:
  """Returns the meanings of attributes by name.

  A meaning is the comment at the attribute's declaration, or the first line of the docstring of its
  property.
  """
  found: dict[str, str] = {}
  for cls in classes:
    found = _own_meanings(cls) | found
  return found


@functools.cache
def _own_meanings(cls: type) -> dict[str, str]:
  """Returns the meanings of the attributes that a class itself declares."""
  found: dict[str, str] = {}
  for name, value in vars(cls).items():
    if name.isupper() and (getattr(value, '__doc__', None) or '') and hasattr(value, 'fget'):
      first = value.__doc__.splitlines()[0].removesuffix('.')
      is_word = first.partition(' ')[0][1:].islower()  # as Width, and not as RoPE
      found[name] = first[0].lower() + first[1:] if is_word else first
  try:
    source = textwrap.dedent(inspect.getsource(cls))
  except (OSError, TypeError):  # made by a function, as the classes of experiments.finetuning
    return found
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
      if comment := _comment('\n'.join(lines)):
        found.setdefault(node.target.id.upper(), comment)
  return found


def _comment(code: str) -> str:
  """Returns the first comment that is for people; # type: ignore and # noqa are for tools."""
  comments = (line for after in code.split('  # ')[1:] for line in after.splitlines()[:1])
  return next((c.strip() for c in comments if not re.match(r'(type: ?ignore|noqa)\b', c)), '')
