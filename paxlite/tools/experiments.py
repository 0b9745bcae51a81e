"""paxlite list [TEXT] [--import=MODULE]

Prints all experiments with their parameter counts; with TEXT, a table of those with TEXT in their
name or dataset. --import=MODULE adds your own module's experiments. The table has the columns that
fit the screen: COLUMNS=150 paxlite list llama shows all, and `paxlite show NAME` all values of one.

Examples:
  paxlite list
  paxlite list llama
  paxlite list --import=my_experiments
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paxlite.cli.parser import Parser
from paxlite.core.errors import UserError
from paxlite.tools import listings

if TYPE_CHECKING:
  from paxlite.experiments.base import Experiment

COLUMNS = (
  'experiment', 'dataset', 'checkpoint policy', 'parameters', 'ICI × DCN', 'devices', 'batch',
  'sequence', 'steps',
)  # fmt: skip
_TEXTS = 3  # columns of texts, aligned left; the other ones are numbers, aligned right
_WIDTH_OF_A_PIPE = 100
_ANY_MODEL = '-'  # the number of parameters of an experiment that takes the model of the weights
_UNITS = (1_000_000_000, 'B'), (1_000_000, 'M'), (1_000, 'K'), (1, '')
_MORE = (
  'paxlite list llama: a table of some; paxlite show NAME: the values of one. paxlite finetune '
  'fine-tunes published weights; paxlite train trains from scratch.'
)
_LEFT_OUT_FIRST = ('checkpoint policy', 'ICI × DCN', 'dataset', 'steps')

PARSER = Parser(__doc__)
PARSER.word('text', 'TEXT', 'part of a name or dataset', required=False)


def main(argv: Sequence[str]) -> None:
  text = PARSER.parsed(argv).text
  screen = shutil.get_terminal_size((_WIDTH_OF_A_PIPE, 0)).columns
  print(table(text, screen) if text else names(screen))


def row(cls: type['Experiment']) -> list[str]:
  """Returns an experiment's row of the table: its family, and a text for each of COLUMNS."""
  import fiddle as fdl

  e = fdl.build(cls.config())
  family = (
    (getattr(sys.modules.get(cls.__module__), '__doc__', None) or cls.__module__)
    .splitlines()[0]
    .rstrip('.')
  )
  return [
    family, cls.__name__, e.dataset, e.values().get('CHECKPOINT_POLICY', ''),
    _ANY_MODEL if e.values().get('MODEL') == '' else f'{num_parameters(e):,}',
    f'{_shape(e.ICI_MESH_SHAPE)} × {_shape(e.DCN_MESH_SHAPE)}', f'{e.num_devices:,}',
    f'{e.batch_size:,}', f'{e.MAX_SEQ_LEN:,}', f'{e.MAX_STEPS:,}',
  ]  # fmt: skip


_NUM_PARAMETERS: dict[str, int] = {}  # by the text of the model's config


def num_parameters(experiment: 'Experiment') -> int:
  """The number of parameters of an experiment's model, without factors of LoRA."""
  import fiddle as fdl
  import jax

  from paxlite.config.templates import config_text
  from paxlite.parallel.quantized_weights import num_parameters

  # a repeated layer is traced once, and has the same parameters
  quick = {'USE_REPEATED_LAYER': True, 'USE_LORA': False}
  e = experiment.plain
  e = e.replaced(**{name: value for name, value in quick.items() if name in e.values()})
  model = e.build_task()
  text = config_text(model.model)
  if text not in _NUM_PARAMETERS:
    params = jax.eval_shape(fdl.build(model).init_params, jax.random.key(0))
    _NUM_PARAMETERS[text] = num_parameters(params)
  return _NUM_PARAMETERS[text]


def names(screen: int) -> str:
  """Returns all experiments by family, as names with numbers of parameters.

  Args:
    screen: Number of characters of a line.
  """
  families: dict[str, list[str]] = {}
  has_data: set[str] = set()
  for family, name, dataset, *cells in _rows():
    count = cells[COLUMNS.index('parameters') - 2]
    size = '' if count == _ANY_MODEL else f' {_rounded(int(count.replace(",", "")))}'
    families.setdefault(family, []).append(name + size)
    if dataset != '-':
      has_data.add(family)
  lines = []
  for heading, are_with in (('With data', True), ('Models, without data', False)):
    lines.append(f'{heading}:')
    titled: dict[str, list[str]] = {}
    for family, members in families.items():
      if (family in has_data) == are_with:
        title = re.split(': |, (?:without|to|for) ', family)[0]  # what is short to say
        titled.setdefault(title if len(members) > 3 else 'Others', []).extend(members)
    for title, members in sorted(titled.items(), key=lambda pair: pair[0] == 'Others'):
      unbroken = ', '.join(member.replace(' ', '\0') for member in members)
      lines += textwrap.wrap(f'- {title}: {unbroken}', screen, subsequent_indent='  ')
  lines += ['', *textwrap.wrap(_MORE, screen, break_on_hyphens=False)]
  return '\n'.join(lines).replace('\0', ' ')


def _rounded(count: int) -> str:
  """Returns a number of parameters with two or three digits: 6.7B, 135M."""
  unit, letter = next(u for u in _UNITS if count >= 0.9995 * u[0])
  number = count / unit
  return f'{number:.1f}{letter}' if number < 10 else f'{number:,.0f}{letter}'


def table(text: str, screen: int) -> str:
  """Returns the table by family; each column is as wide as its longest cell.

  Args:
    text: A part of the names or datasets to list.
    screen: Number of characters of a line, for which columns are left out.
  """
  rows = [r for r in _rows() if text.lower() in ' '.join(r[1:3]).lower()]
  if not rows:
    raise UserError(f'no experiment has {text!r} in its name or dataset: paxlite list shows all')
  cells = [COLUMNS, *(tuple(r[1:]) for r in rows)]
  widths = dict(zip(COLUMNS, (max(map(len, c)) for c in zip(*cells, strict=True)), strict=True))
  for column in _LEFT_OUT_FIRST:
    if sum(widths.values()) + 2 * len(widths) - 2 > screen:
      del widths[column]
  lines = [_line(COLUMNS, widths), '─' * (sum(widths.values()) + 2 * len(widths) - 2)]
  for family in dict.fromkeys(r[0] for r in rows):
    lines += ['', *textwrap.wrap(f'{family}:', screen)]
    lines += [_line(r[1:], widths) for r in rows if r[0] == family]
  return '\n'.join(lines)


def _rows() -> list[list[str]]:
  """Returns the rows of paxlite's experiments, and of the modules of --import=MODULE."""
  rows = listings.experiments()
  if 'paxlite.experiments.base' in sys.modules:  # the module of --import has imported it
    from paxlite.experiments.registry import experiments

    listed = {r[1] for r in rows}
    rows += [row(cls) for name, cls in experiments().items() if name not in listed]
  return rows


def _line(cells: Sequence[str], widths: dict[str, int]) -> str:
  """Returns the cells of the columns in `widths`, each as wide as stated there."""
  aligned = [
    cell.ljust(widths[column]) if column in COLUMNS[:_TEXTS] else cell.rjust(widths[column])
    for column, cell in zip(COLUMNS, cells, strict=True)
    if column in widths
  ]
  return '  '.join(aligned).rstrip()


def _shape(sizes: Sequence[int]) -> str:
  return '[' + ','.join(map(str, sizes)) + ']'
