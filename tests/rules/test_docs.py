"""Checks that every command and every Python example in README.md and docs/ runs."""

import ast
import itertools
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from paxlite import main
from paxlite.tools import listings
from tests.rules import test_structure
from tests.support import runs

PAGES = [
  runs.ROOT / 'README.md',
  runs.ROOT / 'benchmarks' / 'README.md',
  *sorted((runs.ROOT / 'docs').rglob('*.md')),
]
MAKE = {'make demo', 'make test'}  # tests/runs/test_demo.py runs the first
# Commands that prepare the environment that the tests run in.
PREPARING = re.compile(
  r'python3\.\d+ -m venv \.venv|source \.venv/bin/activate|pre-commit install|'
  r"python -m pip install (-e )?('\.\[[a-z0-9,-]+\]'|\.)"
)
# What takes long as it is written: the arguments that come after it. Models of one size have the
# same programs.
_SMALL = ['MAX_STEPS=2', 'NUM_LAYERS=1', 'MODEL_DIMS=64', 'NUM_HEADS=4', 'MAX_EVAL_BATCHES=1']
SHORTENED = {
  'paxlite train DemoGPT --folder=logs/teacher MAX_STEPS=60': _SMALL,
  'paxlite train students.Student --folder=logs/student TEACHER=logs/teacher MAX_STEPS=40': _SMALL,
  'paxlite train DemoGPT': _SMALL,
  'paxlite train answers.Answers --folder=logs/answers TEACHER=logs/teacher MAX_STEPS=2': [
    'NUM_LAYERS=1'
  ],
  'paxlite train DemoGPT --folder=runs/demo MAX_STEPS=20 NUM_LAYERS=1 MODEL_DIMS=64 NUM_HEADS=4 '
  'MAX_EVAL_BATCHES=8': ['MAX_STEPS=2', 'MAX_EVAL_BATCHES=1'],
  'paxlite compile HuggingFaceLoRA MODEL=SmolLM135M FROZEN_DTYPE=nf4 MAX_SEQ_LEN=128 '
  'PERCORE_BATCH_SIZE=1 --target=here': ['NUM_LAYERS=2'],
  'paxlite recipe chat_small --folder=runs/chat_small': [
    f'--set={name}.{value}'
    for name in ('pretrain', 'sft', 'grpo')
    for value in ('NUM_LAYERS=1', 'MODEL_DIMS=32', 'HIDDEN_DIMS=64', 'MAX_STEPS=2', 'holds=None')
  ]
  + [
    '--set=data.paragraphs=50',
    '--set=data.chats=200',
    '--set=pretrain.TRAIN_FILES={data}/facts.txt',
  ],
  'paxlite train my_experiments.MyGPT --folder=runs/my': _SMALL,
  'paxlite train sums.SumsGPT --folder=runs/sums': ['MAX_STEPS=30'],
  'python -m tests.support.fuzz --cases=20': ['--cases=2'],
}
# Pages whose commands take long; `make test-exhaustive` runs them.
LONG = (
  'docs/backends.md', 'docs/data.md', 'docs/explain.md', 'docs/reliability.md',
  'docs/tutorials/cluster.md', 'docs/tutorials/own_text.md',
  'docs/chaos.md', 'docs/data_of_a_run.md', 'docs/ladder.md', 'docs/library.md',
  'docs/optimizers.md', 'docs/reinforcement_learning.md', 'docs/reports.md', 'docs/scaling.md',
  'docs/verifying.md', 'docs/tutorials/add_dataset.md', 'docs/tutorials/evaluate.md',
  'docs/tutorials/long_context.md', 'docs/tutorials/write_layer.md',
  'docs/recipes.md',  # tests/runs/test_recipes.py runs chat_small, and a recipe as on the page
)  # fmt: skip
# Blocks of commands that are not run on an empty folder: the test that runs them, by the word after
# ```sh and the pages, or why none does.
ELSEWHERE = {
  'slow': {
    'tests/parity/test_smollm.py': (
      'benchmarks/README.md', 'docs/evaluation.md', 'docs/fine_tuning.md', 'docs/preferences.md',
      'docs/reinforcement_learning.md', 'docs/tutorials/own_chats.md', 'docs/weights.md',
    ),
    'tests/runs/test_meshes.py': ('docs/scaling.md',),
  },
  'aot': {
    'tests/unit/aot/test_compile.py': ('docs/explain.md', 'docs/scaling.md'),
  },
  'server': {
    'tests/parity/test_smollm.py': ('docs/serving.md',),
    'tests/runs/test_training_api.py': ('docs/training_api.md',),
  },
  'hub': {
    'tests/unit/hub/test_commands.py': ('docs/fine_tuning.md', 'docs/weights.md'),
  },
  'te': {'tests/parity/test_te.py': ('docs/backends.md',)},
  'gpu': {'it needs a GPU, or the index of packages': ('benchmarks/README.md',)},
  'plan': {'it compiles for minutes; tests/unit/aot/planning has small ones': ('docs/scaling.md',)},
  'slurm': {
    'it needs a cluster; tests/runs/test_slurm.py starts such jobs on two virtual nodes': (
      'docs/clusters.md', 'docs/tutorials/cluster.md',
    ),
  },
}  # fmt: skip
# Characters with a meaning outside of quotes: zsh fails if [ ] ? * match no file.
SPECIAL = re.compile(r'[][*?(){}<>|&;`~]')


def blocks(page: pathlib.Path, language: str) -> list[str]:
  return re.findall(rf'^```{language}\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: pathlib.Path) -> list[str]:
  lines = '\n'.join(blocks(page, 'sh')).splitlines()
  return [x for x in lines if x and x not in MAKE and not PREPARING.fullmatch(x)]


def unquoted(line: str) -> str:
  """Returns a command without its comment and without quoted or escaped text."""
  return re.sub(r"\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?:^| )#.*", '', line)


def page_params() -> list:
  """Returns a case of test_commands for each page that has commands."""
  name = lambda page: page.relative_to(runs.ROOT).as_posix()
  return [
    pytest.param(page, id=name(page), marks=[pytest.mark.exhaustive] if name(page) in LONG else [])
    for page in PAGES
    if commands(page)
  ]


@pytest.fixture(scope='module')
def shown() -> set[str]:
  """The commands of earlier pages that only print, which are not run again."""
  return set()


@pytest.mark.slow
@pytest.mark.parametrize('page', page_params())
def test_commands(page, tmp_path, shown):
  """Runs in an empty folder, with the package's data where a command expects it."""
  data = pathlib.Path('paxlite', 'data', 'packaged')
  (tmp_path / data).parent.mkdir(parents=True)
  (tmp_path / data).symlink_to(runs.ROOT / data)
  for name in ('README.md', 'benchmarks', 'tests'):
    (tmp_path / name).symlink_to(runs.ROOT / name)
  for i, code in enumerate(blocks(page, 'python')):
    name = re.match(r'# (\w+)\.py', code)
    (tmp_path / (f'{name[1]}.py' if name else f'example_{i}.py')).write_text(code)
  for line in commands(page):
    words = shlex.split(line, comments=True)
    if line in shown:
      continue
    if '--dry_run' in words and not any(x.stem in line for x in tmp_path.glob('*.py')):
      shown.add(line)
    given = itertools.takewhile(re.compile(r'[A-Z_]+=').match, words)
    variables = dict(word.split('=', 1) for word in given)
    words = words[len(variables) :]
    assert words[0] in ('python', 'paxlite'), line
    command = words[1:] if words[0] == 'python' else ['-m', *words]
    command += SHORTENED.get(line, [])
    own = {'PYTHONPATH': f'{tmp_path}:{runs.ROOT}'} | variables
    environment = runs.environment(as_users=page.name == 'README.md') | own
    result = runs.ended([sys.executable, *command], environment, cwd=tmp_path)
    assert result.returncode == 0, f'{line}\n{result.stdout}\n{result.stderr}'
  written = [p.name for p in tmp_path.iterdir() if not p.is_symlink()]
  written = [n for n in written if not n.startswith(('example_', '__pycache__'))]
  written.remove('paxlite')
  if written and (runs.ROOT / '.git').exists():
    ignored = subprocess.run(
      ['git', 'check-ignore', '--no-index', *(n + '/' * (tmp_path / n).is_dir() for n in written)],
      cwd=runs.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert {n.rstrip('/') for n in ignored.stdout.split()} == set(written), 'for git status'


def test_every_block_of_commands_is_run_or_says_why_not():
  named = lambda page: page.relative_to(runs.ROOT).as_posix()
  found = {
    (word, named(page))
    for page in PAGES
    for word in re.findall(r'^```sh +(\S+)', page.read_text(), re.MULTILINE)
  }
  told = [(word, page) for word, of in ELSEWHERE.items() for pages in of.values() for page in pages]
  assert sorted(found) == sorted(told)
  tests = [test for of in ELSEWHERE.values() for test in of if test.startswith('tests/')]
  assert [test for test in tests if 'sh ' not in (runs.ROOT / test).read_text()] == []


@pytest.mark.parametrize('page', [*PAGES, runs.ROOT / 'CONTRIBUTING.md'], ids=lambda p: p.name)
def test_commands_can_be_pasted_into_any_shell(page):
  """Checks commands in blocks and commands within a line."""
  text = page.read_text()
  lines = '\n'.join(blocks(page, r'sh[^\n]*')).splitlines()
  lines += re.findall(r'^    (python .*|pip .*)', text, re.MULTILINE)
  assert [x for x in lines if SPECIAL.search(unquoted(x))] == []
  prose = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE)
  inline = re.findall(r'`((?:python|pip|--fdl)[^`]*)`', prose)
  assert [x for x in inline if re.search(r'=\[', unquoted(x))] == []


def test_the_readme_is_short_and_says_how_to_install():
  text = (runs.ROOT / 'README.md').read_text()
  assert len(text.splitlines()) <= 120
  first = text[: text.index('## Measured speed')]
  assert 'make demo' in first
  assert '(#install)' in first
  install = text.split('\n## Install\n')[1].split('\n## ')[0]
  for needed in ('python -m pip install .', "'.[cuda12]'", "'.[cuda13]'", "'.[tpu]'"):
    assert needed in install
  pages = [p.read_text() for p in PAGES]
  sources = [p.read_text() for p in (runs.ROOT / 'paxlite').rglob('*.py') if p.name != 'shell.py']
  assert not [x for x in pages + sources if re.search('pip install [\'"]?paxlite', x)], 'PyPI'


def test_flags_in_messages_and_docstrings_can_be_pasted_into_any_shell():
  """Lists must be quoted, by shell.flag if they are computed, otherwise in the text."""
  wrong = []
  for path in (runs.ROOT / 'paxlite').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.JoinedStr):
        text = ''.join(v.value if isinstance(v, ast.Constant) else '{}' for v in node.values)
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
      else:
        continue
      found = re.findall(r"""(?<!['"])--fdl\.[A-Z_0-9]+=[\[{].*""", text)
      found += re.findall(r"""(?<!['"A-Z_0-9.])[A-Z_0-9]+=\[.*""", text)
      wrong += [(path.name, m) for m in found]
  for path in (runs.ROOT / 'paxlite' / 'other_systems').glob('*.json'):
    wrong += [(path.name, m) for m in re.findall(r'--fdl\.[A-Z_0-9]+=[\[{].*', path.read_text())]
  types = {row['name']: row['type'] for row in listings.attributes()}
  type_of = lambda flag: types[flag.removeprefix('--fdl.').partition('=')[0]]
  is_number = lambda flag: type_of(flag).removesuffix(' or None') in ('int', 'float')
  assert not [(name, flag) for name, flag in wrong if not is_number(flag)]


def test_flags_of_an_error_can_be_pasted_and_work(tmp_path, capsys):
  asked = ['x', '--fdl_config=TinyGPT', '--mode=eval', f'--job_log_dir={tmp_path}/run']
  assert main.main([*asked, '--fdl.ICI_MESH_SHAPE=[8,1,1]', '--fdl.MAX_STEPS=2']) == 2
  hint = capsys.readouterr().err.partition('To use what is here: ')[2]
  assert not SPECIAL.search(unquoted(hint))
  assert main.main([*asked, *shlex.split(hint)]) == 2
  assert 'holds no checkpoint to evaluate' in capsys.readouterr().err


def test_the_templates_example(tmp_path):
  """The class in docs/experiments.md builds, and does what the page says."""
  import fiddle as fdl

  code = next(c for c in blocks(runs.ROOT / 'docs' / 'experiments.md', 'python') if 'Gated' in c)
  scope: dict = {'__name__': 'example'}
  exec(compile(code, 'example', 'exec'), scope)
  task = scope['Gated']().build_task()
  layer = task.model.transformer_tpl.layer_tpl
  assert layer.attention_tpl.attention_tpl.logit_cap == 30.0
  built = fdl.build(layer.ffn_tpl)
  assert built.func.__name__ == 'GatedFeedForward'


def test_links_lead_somewhere():
  for page in PAGES:
    for target in re.findall(r'\]\(([^)#:]+)\)', page.read_text()):
      assert (page.parent / target).exists(), f'{page.name}: {target}'


def test_what_agents_are_told_is_so():
  """The rooms of AGENTS.md are those of the core in their order, and its commands start."""
  page = runs.ROOT / 'AGENTS.md'
  text = page.read_text()
  for target in re.findall(r'\]\(([^)#:]+)\)', text):
    assert (runs.ROOT / target).exists(), target
  rooms = text.split('may import:\n')[1].split('`')[1].split()
  assert rooms == [x for x in test_structure.ROOMS if x in rooms]
  targets = re.findall(r'^([a-z-]+):', (runs.ROOT / 'Makefile').read_text(), re.MULTILINE)
  for line in commands(page):
    word, *rest = line.split()
    if word == 'make':
      assert rest[0] in targets
    else:
      paths = [x for x in rest if x.startswith('tests/')]
      assert word == '.venv/bin/python'
      assert all((runs.ROOT / path).exists() for path in paths)
  for path in re.findall(r'`((?:paxlite|tests|docs|benchmarks)/[^`<]*)`', text):
    assert (runs.ROOT / path).exists(), path
