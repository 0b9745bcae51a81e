"""Nothing of the current folder is imported but the modules that the user names."""

import pathlib
import subprocess
import sys

import pytest

from paxlite.data import packaged
from tests.support import runs

OWN = """
import helper
from paxlite.experiments.registry import find

class Mine(find('TinyGPT')):
  NUM_LAYERS = helper.LAYERS

  def task(self):
    import later
    return later.same(super().task())
"""
EXPERIMENT = 'mine.Mine'
# files that a library imports at some moment: by name, as a plugin, or if it is installed
TRAPS = 'typing.py queue.py tempfile.py cloudpickle.py tensorflow.py jax_plugins/evil.py entry.py'


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  for trap in TRAPS.split():
    path = tmp_path / trap
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'open({str(tmp_path / "caught")!r}, "a").write({trap!r})\n')
  metadata = tmp_path / 'x.dist-info'
  metadata.mkdir()
  (metadata / 'METADATA').write_text('Metadata-Version: 2.1\nName: x\nVersion: 1\n')
  (metadata / 'entry_points.txt').write_text('[jax_plugins]\nx = entry\n')
  (tmp_path / 'mine.py').write_text(OWN)
  (tmp_path / 'helper.py').write_text('LAYERS = 1\n')
  (tmp_path / 'later.py').write_text('same = lambda x: x\n')
  return tmp_path


def ended(folder: pathlib.Path, *command: str, code: int = 0, or_code: int = 0) -> str:
  environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  process = subprocess.run(
    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
  )
  assert process.returncode in (code, or_code or code), process.stderr
  caught = folder / 'caught'
  assert not caught.exists(), f'{caught.read_text()} of the current folder was imported'
  return process.stdout + process.stderr


@pytest.mark.parametrize(
  'start',
  [
    '-m paxlite.main',
    pytest.param('-mpaxlite.main', marks=pytest.mark.slow),
    pytest.param('-X dev -P -m paxlite.main', marks=pytest.mark.slow),
  ],
)
def test_an_experiment_of_the_current_folder_and_nothing_else(folder, start):
  """The process restarts with other settings of malloc, and asks JAX for its devices."""
  command = sys.executable, *start.split(), f'--fdl_config={EXPERIMENT}', '--dry_run'
  assert 'NUM_LAYERS = 1\n' in ended(folder, *command)


@pytest.mark.slow
def test_a_run_by_the_installed_script(folder):
  script = pathlib.Path(sys.executable).with_name('paxlite')
  text = 'import sys; from paxlite.__main__ import main; sys.exit(main())'
  command = [str(script)] if script.exists() else [sys.executable, '-P', '-c', text]
  train = *command, 'train', EXPERIMENT, '--folder=run', 'MAX_STEPS=1'
  assert 'step 1/1' in ended(folder, *train)
  assert 'productive steps' in ended(folder, *command, 'goodput', 'run')


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  'arguments',
  ['doctor', f'show {EXPERIMENT}', 'list --import=mine', 'tokenize --help', 'explain TinyGPT'],
)
def test_other_commands(folder, arguments):
  # this machine may have a problem that doctor finds, such as a disk that is nearly full
  or_code = 1 if arguments == 'doctor' else 0
  ended(folder, sys.executable, '-m', 'paxlite', *arguments.split(), or_code=or_code)


@pytest.mark.slow
def test_the_workers_that_tokenize(folder):
  (folder / 'a.txt').write_text('One line.\n' * 100)
  flags = '--vocab', str(packaged.VOCAB), '--output=out', '--processes=2'
  ended(folder, sys.executable, '-m', 'paxlite', 'tokenize', 'a.txt', *flags)


@pytest.mark.slow
def test_what_is_not_named_is_not_found(folder):
  said = ended(
    folder, sys.executable, '-m', 'paxlite.main', '--fdl_config=absent.Mine', '--dry_run', code=2
  )
  assert 'no module is named absent' in said
