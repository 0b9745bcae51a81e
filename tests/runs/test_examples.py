"""Each script of examples/ trains, in tiny sizes, as its docstring says that it is called."""

import re
import sys

import pytest

from paxlite.weights.commands import export_weights
from tests.support import runs
from tests.support.imported import flat, loaded, run_import

EXAMPLES = runs.ROOT / 'examples'
ARGUMENTS = {
  'pretrain': ['--steps=3', '--layers=1', '--width=32'], 'finetune': ['--steps=30'],
  'lora': ['--steps=30'], 'own_layer': ['--steps=3'], 'own_loss': ['--steps=3', '--penalty=0.2'],
  'python_loop': ['--steps=3'],
}  # fmt: skip
# A number that the script prints at its end: a loss, or a share of right answers.
PRINTS = {
  'pretrain': r'^\s+3 \d\.\d+$', 'own_layer': r'^Squared: \d\.\d+ nats',
  'own_loss': r'^sureness: -\d+\.\d+$', 'python_loop': r'^\d+\.\d% of the last batch',
}  # fmt: skip


def called(name: str, *arguments: str) -> str:
  command = [sys.executable, str(EXAMPLES / f'{name}.py'), *arguments]
  environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  result = runs.ended(command, environment)
  assert result.returncode == 0, f'{result.stdout}\n{result.stderr}'
  return result.stdout


def test_every_script_says_its_command():
  scripts = {path.stem: path.read_text() for path in EXAMPLES.glob('*.py')}
  assert set(scripts) == {*ARGUMENTS, 'evaluate', 'from_gguf', 'small_weights'}
  for name, text in scripts.items():
    command = 'paxlite import' if name == 'small_weights' else f'python examples/{name}.py'
    assert f'\n    {command}' in text, name


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', PRINTS)
def test_a_script_runs(name, tmp_path):
  folder = [] if name == 'python_loop' else [f'--folder={tmp_path}/run']
  printed = called(name, *ARGUMENTS[name], *folder)
  assert re.search(PRINTS[name], printed, re.MULTILINE), printed
  if name == 'pretrain':
    judged = called('evaluate', f'{tmp_path}/run')
    bits = re.search(r'^(\d+\.\d+) bits per byte', judged)
    assert bits, judged
    assert 2 < float(bits[1]) < 8  # 13 bits a token at random
    assert re.search(r'^the children of (Israel|is|very)$', judged, re.MULTILINE)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', ['finetune', 'lora'])
def test_weights_are_tuned(name, tmp_path):
  printed = called(name, *ARGUMENTS[name], f'--folder={tmp_path}')
  first, last = map(float, re.findall(r'(\d+\.\d+) at (?:first|last)', printed))
  assert last < first - 1, printed


@pytest.mark.slow
def test_a_gguf_file_is_imported_by_way_of_transformers(tmp_path, monkeypatch):
  for package in ('gguf', 'torch', 'transformers'):
    pytest.importorskip(package)
  monkeypatch.syspath_prepend(EXAMPLES)
  from small_weights import imported

  weights, back = imported(tmp_path), tmp_path / 'back'
  export_weights.main([str(weights), '--to=gguf', '--type=f32', f'--path={tmp_path / "gguf"}'])
  called('from_gguf', str(tmp_path / 'gguf' / 'model-f32.gguf'), f'--to={tmp_path / "hf"}')
  run_import('hf', tmp_path / 'hf', back)
  before, after = (flat(loaded(folder)[2]) for folder in (weights, back))
  assert before.keys() == after.keys()
  for name, value in before.items():
    assert (after[name] == value).all(), name
