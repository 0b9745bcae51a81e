"""python -m paxlite.tools.experiments [list [TEXT] | show NAME | diff A B] [--fdl.NAME=VALUE …]

Prints a table of every experiment, or of those with TEXT in their name or dataset (`experiments
llama`). `show` prints the values of one experiment, their meanings, and its built config. `diff`
prints the lines in which two experiments differ. NAME is a bare name or a dotted path.
--import=MODULE adds the experiments of your own module to the table.
"""

import argparse
import ast
import difflib
import inspect
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paxlite.core import command_line
from paxlite.core.errors import UserError

if TYPE_CHECKING:
  from paxlite.experiments.base import Experiment

# The table's rows for paxlite's own experiments, so that listing them imports none of them.
# python -m tests.rules.test_golden --update writes the file, and a test checks it.
INDEX = pathlib.Path(__file__).parents[1] / 'experiments' / 'index.json'

COLUMNS = (
  'experiment',
  'dataset',
  'checkpoint policy',
  'parameters',
  'ICI × DCN',
  'devices',
  'batch',
  'sequence',
  'steps',
)
_TEXTS = 3  # columns of texts, aligned left; the other ones are numbers, aligned right
_COMMANDS = ('list', 'show', 'diff')


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    prog='python -m paxlite.tools.experiments',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(dest='command')
  table = commands.add_parser('list', help='a table of experiments')
  table.add_argument('text', nargs='?', default='', help='of their names or datasets')
  commands.add_parser('show', help='values and built config of one').add_argument('name')
  diff = commands.add_parser('diff', help='where two differ')
  diff.add_argument('a')
  diff.add_argument('b')
  if argv and argv[0] not in _COMMANDS and not argv[0].startswith('-'):
    argv = ['list', *argv]
  args, values = command_line.parse(parser, argv)
  if args.command == 'show':
    print(_text(args.name, values, explained=True))
  elif args.command == 'diff':
    a, b = _text(args.a, values).splitlines(), _text(args.b, values).splitlines()
    for line in difflib.unified_diff(a, b, args.a, args.b, lineterm='', n=0):
      if not line.startswith('@@'):
        print(line)
  else:
    print(_table(getattr(args, 'text', '')))


def row(cls: type['Experiment']) -> list[str]:
  """Returns an experiment's row of the table: its family, and a text for each of COLUMNS."""
  import fiddle as fdl

  e = fdl.build(cls.config())
  family = (sys.modules[cls.__module__].__doc__ or cls.__module__).splitlines()[0].rstrip('.')
  return [
    family,
    cls.__name__,
    e.dataset,
    e.values().get('CHECKPOINT_POLICY', ''),
    f'{num_parameters(e):,}',
    f'{_shape(e.ICI_MESH_SHAPE)} × {_shape(e.DCN_MESH_SHAPE)}',
    f'{e.num_devices:,}',
    f'{e.batch_size:,}',
    f'{e.MAX_SEQ_LEN:,}',
    f'{e.MAX_STEPS:,}',
  ]


def num_parameters(experiment: 'Experiment') -> int:
  """The number of parameters of an experiment's model."""
  import fiddle as fdl
  import jax

  state = jax.eval_shape(fdl.build(experiment.plain.task()).init, jax.random.key(0))
  return sum(x.size for x in jax.tree.leaves(state.params))


def _table(text: str) -> str:
  """Returns the table by family; each column is as wide as its longest cell."""
  rows = [r for r in _rows() if text.lower() in ' '.join(r[1:3]).lower()]
  if not rows:
    raise UserError(
      f'no experiment has {text!r} in its name or dataset: '
      'python -m paxlite.tools.experiments lists them all'
    )
  widths = [max(map(len, column)) for column in zip(COLUMNS, *(r[1:] for r in rows), strict=True)]
  lines = [_line(COLUMNS, widths), '─' * (sum(widths) + 2 * len(widths) - 2)]
  for family in dict.fromkeys(r[0] for r in rows):
    lines += ['', f'{family}:', *(_line(r[1:], widths) for r in rows if r[0] == family)]
  return '\n'.join(lines)


def _rows() -> list[list[str]]:
  """Returns the rows of the index, and of the modules of --import=MODULE."""
  rows = json.loads(INDEX.read_text(encoding='utf-8'))
  if 'paxlite.experiments.base' in sys.modules:  # the module of --import has imported it
    from paxlite.experiments.registry import experiments

    indexed = {r[1] for r in rows}
    rows += [row(cls) for name, cls in experiments().items() if name not in indexed]
  return rows


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
  texts = [c.ljust(w) for c, w in zip(cells[:_TEXTS], widths[:_TEXTS], strict=True)]
  numbers = [c.rjust(w) for c, w in zip(cells[_TEXTS:], widths[_TEXTS:], strict=True)]
  return '  '.join([*texts, *numbers]).rstrip()


def _text(name: str, overrides: dict[str, str], explained: bool = False) -> str:
  from paxlite.experiments.description import configs_text, values_text
  from paxlite.experiments.registry import build_experiment

  experiment = build_experiment(name, [], overrides)
  values = values_text(experiment)
  if explained:
    meanings = _meanings(type(experiment).__mro__)
    values = '\n'.join(_explained(line, meanings) for line in values.split('\n'))
  return values + '\n' + configs_text(experiment)


def _explained(line: str, meanings: dict[str, str]) -> str:
  meaning = meanings.get(line.partition(' = ')[0])
  return line if meaning is None else f'{line}  # {meaning}'


def _meanings(classes: Iterable[type]) -> dict[str, str]:
  """Returns the meanings of attributes by name.

  A meaning is the comment at the attribute's declaration, or the first line of the docstring of its
  property.
  """
  found: dict[str, str] = {}
  for cls in classes:
    if cls is object:
      continue
    for name, value in vars(cls).items():
      if name.isupper() and (getattr(value, '__doc__', None) or '') and hasattr(value, 'fget'):
        found.setdefault(name, value.__doc__.splitlines()[0])
    source = textwrap.dedent(inspect.getsource(cls))
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
        if comment := re.search(r'  # (?!noqa)(.*)', '\n'.join(lines)):
          found.setdefault(node.target.id, comment[1])
  return found


def _shape(sizes: Sequence[int]) -> str:
  return '[' + ','.join(map(str, sizes)) + ']'


if __name__ == '__main__':
  command_line.run(main)
