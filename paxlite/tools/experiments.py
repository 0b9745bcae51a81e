"""python -m paxlite.tools.experiments [list | show NAME | diff A B] [--fdl.NAME=VALUE …]

list (or nothing) prints a table of every experiment, show the values and the built config of one,
diff the lines in which two differ. NAME is a bare name or a dotted path.
"""

import argparse
import difflib
from collections.abc import Sequence

from paxlite.tools import cli


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    prog='python -m paxlite.tools.experiments',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(dest='command')
  commands.add_parser('list', help='a table of every experiment')
  commands.add_parser('show', help='values and built config of one').add_argument('name')
  diff = commands.add_parser('diff', help='where two differ')
  diff.add_argument('a')
  diff.add_argument('b')
  overrides = [a for a in argv if a.startswith('--fdl.')]
  args = parser.parse_args([a for a in argv if a not in overrides])
  values = dict(a.removeprefix('--fdl.').partition('=')[::2] for a in overrides)
  if args.command == 'show':
    print(_text(args.name, values))
  elif args.command == 'diff':
    a, b = _text(args.a, values).splitlines(), _text(args.b, values).splitlines()
    for line in difflib.unified_diff(a, b, args.a, args.b, lineterm='', n=0):
      if not line.startswith('@@'):
        print(line)
  else:
    _print_table()


def _text(name: str, overrides: dict[str, str]) -> str:
  from paxlite.configuration import configs_text, values_text
  from paxlite.main import build_experiment

  experiment = build_experiment(name, [], overrides)
  return values_text(experiment) + '\n' + configs_text(experiment)


def _print_table() -> None:
  import fiddle as fdl
  import jax
  import rich.box
  from rich.console import Console
  from rich.table import Table

  from paxlite.experiment import experiments

  table = Table(box=rich.box.SIMPLE_HEAD)
  for column in ('experiment', 'dataset', 'checkpoint policy'):
    table.add_column(column, no_wrap=True)
  for column in ('parameters', 'ICI × DCN', 'devices', 'batch', 'sequence', 'steps'):
    table.add_column(column, justify='right', no_wrap=True)
  for name, cls in experiments().items():
    e = fdl.build(cls.config())
    state = jax.eval_shape(fdl.build(e.task()).init, jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(state.params))
    table.add_row(
      name,
      e.dataset,
      e.CHECKPOINT_POLICY if hasattr(e, 'CHECKPOINT_POLICY') else '',
      f'{count:,}',
      f'{_shape(e.ICI_MESH_SHAPE)} × {_shape(e.DCN_MESH_SHAPE)}',
      f'{e.num_devices:,}',
      f'{e.batch_size:,}',
      f'{e.MAX_SEQ_LEN:,}',
      f'{e.MAX_STEPS:,}',
    )
  Console(width=max(Console().width, 150)).print(table)


def _shape(sizes: Sequence[int]) -> str:
  return '[' + ','.join(map(str, sizes)) + ']'


if __name__ == '__main__':
  cli.run(main)
