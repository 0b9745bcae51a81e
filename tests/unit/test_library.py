"""paxlite as a library: what its top level offers, and a run from Python."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

import paxlite
from paxlite.core.errors import UserError
from tests.support import runs

TEXT = 'tests.support.experiments.TinyText'


def test_importing_paxlite_imports_no_jax():
  code = 'import paxlite, sys; print(*{"jax", "flax", "fiddle", "numpy"} & set(sys.modules))'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=runs.ROOT
  )
  assert done.stdout == '\n'


def test_every_public_name_is_there_and_documented():
  for name in paxlite.__all__:
    assert getattr(paxlite, name).__doc__, name
  assert set(paxlite.__all__) == set(paxlite._WHERE)
  with pytest.raises(AttributeError, match="module paxlite has no attribute 'nothing'"):
    paxlite.nothing  # noqa: B018 - raises


@pytest.mark.slow
def test_a_run_from_python(tmp_path):
  experiment = paxlite.get(TEXT)(
    MAX_STEPS=4, EVAL_INTERVAL_STEPS=2, NUM_LAYERS=1, SAMPLE_PROMPT=None
  )
  assert repr(experiment).endswith(
    'TinyText(MAX_STEPS=4, EVAL_INTERVAL_STEPS=2, NUM_LAYERS=1, SAMPLE_PROMPT=None)'
  )
  run = paxlite.train(experiment, tmp_path / 'run')
  assert list(run.metrics['step']) == [1, 2, 3, 4]
  assert np.isnan(run.metrics['tokens_per_second'][0])  # the first step is not measured
  assert list(run.evaluations['input']) == ['held_out'] * 2
  again = paxlite.load(tmp_path / 'run')
  text = 'In the beginning'
  logits = again.logits(text)
  ids = again.inference.encode(text)
  assert logits.shape == (len(ids), experiment.VOCAB_SIZE)
  np.testing.assert_array_equal(logits, run.logits(ids))
  of_both = run.logits([ids, ids])
  assert of_both.shape == (2, *logits.shape)
  np.testing.assert_allclose(of_both[1], logits, atol=1e-5)
  for wrong in ([ids, ids[1:]], [], [[]], ['a'], [0.5], np.zeros((1, 1, 1), int)):
    with pytest.raises(UserError, match=r'token ids \[T\], or sequences \[B, T\]'):
      run.logits(wrong)
  for outside in (-1, experiment.VOCAB_SIZE):
    with pytest.raises(UserError, match=rf'outside the vocabulary of \d+: \[{outside}\]'):
      run.logits([*ids, outside])
  (first,) = again.inference.engine().continuations([ids], 1)
  assert first == [int(np.argmax(logits[-1]))]
  assert again.generate(text, 5) == run.generate(text, 5)


def test_the_module_of_a_run_is_asked_for_when_it_is_loaded(tmp_path, capsys):
  (tmp_path / 'experiment.json').write_text('{"experiment": "my_module.Mine", "values": {}}')
  assert paxlite.load(tmp_path).metrics == {}
  said = capsys.readouterr().err
  assert said.startswith(f'{tmp_path}: the checkpoint is of the experiment my_module.Mine')
  assert '`import my_module` in Python' in said
  assert said.count('\n') == 1


def test_what_there_is_not(tmp_path):
  with pytest.raises(paxlite.UserError, match='Did you mean TinyGPT'):
    paxlite.get('TinyGP')
  with pytest.raises(paxlite.UserError, match='is not a folder'):
    paxlite.load(tmp_path / 'nothing')
  (tmp_path / 'empty').mkdir()
  assert paxlite.load(tmp_path / 'empty').metrics == {}
  with pytest.raises(paxlite.UserError, match='holds no weights'):
    paxlite.load(tmp_path / 'empty').generate('x')


@pytest.fixture
def registered():
  """The registered experiments; that of a test is removed at its end."""
  from paxlite.experiments import registry

  yield registry._REGISTRY
  registry._REGISTRY.pop('MyDemoGPT', None)


def test_an_experiment_of_ones_own(tmp_path, monkeypatch, capsys, registered):
  from paxlite.tools import new

  monkeypatch.chdir(tmp_path)
  new.main(['mine.py', '--base=DemoGPT'])
  assert 'paxlite train mine.MyDemoGPT' in capsys.readouterr().out
  spec = importlib.util.spec_from_file_location('mine', 'mine.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  assert registered['MyDemoGPT'] is module.MyDemoGPT
  assert module.MyDemoGPT().NUM_LAYERS == paxlite.get('DemoGPT')().NUM_LAYERS
  for path, why in (('mine.py', 'exists'), ('mine.txt', 'named like'), ('a-b.py', 'named like')):
    with pytest.raises(paxlite.UserError, match=why):
      new.main([path])
