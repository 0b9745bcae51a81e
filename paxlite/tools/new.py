"""paxlite new FILE [--base=EXPERIMENT]

Writes a Python file with your own experiment, a copy of EXPERIMENT (TinyGPT), and prints the
command that trains it.

Example:
  paxlite new my_experiments.py --base=DemoGPT
"""

import keyword
import pathlib
from collections.abc import Sequence

from paxlite.cli.parser import Parser, local
from paxlite.core.errors import UserError

_TEXT = '''"""An experiment of my own."""

from paxlite.experiments.registry import register
from {module} import {base}


@register
class {name}({base}):
  """{command}"""

  # `paxlite show {path}` prints all attributes with their meanings.
{attributes}
'''
_SHOWN = ('NUM_LAYERS', 'MODEL_DIMS', 'LEARNING_RATE', 'MAX_STEPS')

PARSER = Parser(__doc__)
PARSER.word('output', 'FILE', 'file to write, such as my_experiments.py', local)
PARSER.option('--base', 'experiment to copy (TinyGPT)', default='TinyGPT')


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  path = pathlib.Path(args.output)
  if path.suffix != '.py' or not path.stem.isidentifier() or keyword.iskeyword(path.stem):
    raise UserError(
      f'{path} must be named like a Python module (letters, digits and _, then .py), such as '
      'my_experiments.py'
    )
  if path.exists():
    raise UserError(f'{path} exists: choose another name')
  from paxlite.programs.launch import build_experiment

  base = build_experiment(args.base, [], {})
  cls = type(base)
  name = f'My{cls.__name__}'
  command = f'paxlite train {path.stem}.{name}'
  values = base.values()
  attributes = '\n'.join(f'  {a} = {values[a]!r}' for a in _SHOWN if a in values)
  text = _TEXT.format(
    module=cls.__module__, base=cls.__name__, name=name, command=command,
    path=f'{path.stem}.{name}', attributes=attributes,
  )  # fmt: skip
  try:
    path.write_text(text, encoding='utf-8')
  except OSError as e:
    raise UserError(f'{path} cannot be written: {e.strerror}') from None
  where = '' if path.parent == pathlib.Path('.') else f' in the folder {path.parent}'
  print(f'{path} has the experiment {name}. To train it{where}:\n  {command}')
