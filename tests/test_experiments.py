"""Every registered experiment: its golden text, and one step of it at a small size.

`python -m tests.test_experiments --update` rewrites tests/golden/ and the tool's table.
"""

import json
import pathlib
import re
import sys

import fiddle as fdl
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.description import configs_text, requirements, values_text
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.registry import experiments, find, register
from paxlite.programs.run import Run
from paxlite.tools import experiments as tools

GOLDEN = pathlib.Path(__file__).parent / 'golden'
NAMES = list(experiments())

SHRUNK = dict(
  NUM_LAYERS=1,
  NUM_HEADS=2,
  NUM_KV_HEADS=2,
  MODEL_DIMS=16,
  DIMS_PER_HEAD=8,
  HIDDEN_DIMS=32,
  MAX_SEQ_LEN=16,
  ICI_MESH_SHAPE=[1, 1, 1],
  DCN_MESH_SHAPE=[1, 1, 1],
  PERCORE_BATCH_SIZE=2,
  MAX_STEPS=1,
  MAX_EVAL_BATCHES=1,
  SUMMARY_INTERVAL_STEPS=1,
)


def golden_text(name: str) -> str:
  experiment = fdl.build(find(name).config())
  text = '\n'.join([values_text(experiment), configs_text(experiment), ''])
  wanted = ('parameters', 'per device', 'global batch', 'model FLOPs')
  lines = [x for x in requirements(experiment).splitlines() if x.startswith(wanted)]
  text += '\n'.join(['', *lines, ''])
  package = str(pathlib.Path(__file__).parents[1] / 'paxlite')
  return text.replace(package, 'paxlite')


def index_text() -> str:
  rows = [tools.row(find(name)) for name in NAMES]
  lines = [json.dumps(row, ensure_ascii=False) for row in rows]
  return '[\n' + ',\n'.join(lines) + '\n]\n'


@pytest.mark.parametrize('name', NAMES)
def test_golden(name):
  golden = (GOLDEN / f'{name}.txt').read_text()
  assert golden == golden_text(name), 'python -m tests.test_experiments --update if this is meant'


def test_the_table_is_that_of_the_experiments():
  """It is read from a file, so that it is there at once."""
  assert tools.INDEX.read_text() == index_text(), 'python -m tests.test_experiments --update'


def test_no_golden_is_left_over():
  assert {p.stem for p in GOLDEN.glob('*.txt')} == set(NAMES)


WITHOUT_FILES = [n for n in NAMES if re.match('Synthetic|Demo|Tiny', n)]
FAMILIES = [
  'GPT2',
  'paxlite.experiments.llama.LLaMA7B',
  'LLaMA3_2_1B',
  'Mistral7B',
  'Gemma2B',
  'Seqax84M',
]


QUICK = {'TinyGPT', 'Synthetic126M', 'SyntheticGLaM126M64E', 'LLaMA3_2_1B', 'Gemma2B'}


@pytest.mark.parametrize(
  'name',
  [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in WITHOUT_FILES + FAMILIES],
)
def test_one_small_step(name, tmp_path):
  cls = find(name)
  if name in FAMILIES:
    cls = type(f'Synthetic{cls.__name__}', (Synthetic, cls), {})
  cfg = cls.config()
  experts = dict(NUM_LAYERS=2, NUM_EXPERTS=4) if hasattr(cls, 'NUM_EXPERTS') else {}
  for attribute, value in (SHRUNK | experts).items():
    setattr(cfg, attribute, value)
  experiment = fdl.build(cfg)
  experiment.validate()
  trainer = Run(experiment, tmp_path, save=False).trainer()
  state = trainer.train(*trainer.states.initial())
  assert int(state.step) == 1
  assert int(state.skipped) == 0


@pytest.mark.parametrize('name', NAMES)
def test_the_docstring_starts_with_the_command(name):
  first = find(name).__doc__.splitlines()[0]
  assert first.startswith(f'python -m paxlite.main --fdl_config={name} ')


def test_dotted_and_bare_names_find_the_same():
  assert find('GPT126M') is find('paxlite.experiments.gpt.GPT126M') is GPT126M


def test_two_experiments_of_one_name_are_an_error():
  with pytest.raises(UserError, match='GPT126M is registered by'):
    register(type('GPT126M', (Experiment,), {}))


if __name__ == '__main__' and '--update' in sys.argv:
  GOLDEN.mkdir(exist_ok=True)
  for old in GOLDEN.glob('*.txt'):
    old.unlink()
  tools.INDEX.write_text(index_text())
  for name in NAMES:
    (GOLDEN / f'{name}.txt').write_text(golden_text(name))
