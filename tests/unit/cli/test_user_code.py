"""Errors that come out at a user's own code: few lines that name it, and no traceback."""

import subprocess
import sys
import textwrap
import types

import pytest

from paxlite import main
from paxlite.cli import user_code
from paxlite.core.errors import doing
from tests.support import runs

HEAD = """
import fiddle as fdl, jax, jax.numpy as jnp, optax
from fiddle import selectors
from paxlite.config.templates import config
from paxlite.data.base import RowInput
from paxlite.experiments.demo import TinyGPT
from paxlite.layers.feedforward import FeedForward
from paxlite.losses.loss import Loss
from paxlite.parallel.partitioning import param
from paxlite.training.callbacks import Callback
"""
LOSS = (
  HEAD
  + """
class MyLoss(Loss):
  reads_params = True

  def __call__(self, {arguments}):
    {body}

  def metrics(self, outputs, batch):
    return {metrics}

class Mine(TinyGPT):
  NUM_LAYERS = 1
  MAX_STEPS = 2
  def losses(self):
    return {{"mine": config(MyLoss)}}
"""
)
ARGUMENTS = 'outputs, batch'
WITH_LAYER = (
  HEAD
  + """
class Layer(FeedForward):
  def hidden(self, x_BTD):
    {body}

class Mine(TinyGPT):
  NUM_LAYERS = 1
  def model(self):
    model = super().model()
    for layer in selectors.select(model, FeedForward):
      fdl.update_callable(layer, Layer)
    return model
"""
)
METHOD = (
  HEAD
  + """
class Bad(Callback):
  def on_evaluation(self, state, step, evaluations, summaries):
    raise OSError('no network')  # here

class Mine(TinyGPT):
  NUM_LAYERS = 1
  {body}
"""
)
loss = lambda body='return jnp.zeros(())', arguments=ARGUMENTS, metrics='{}': LOSS.format(
  body=body, arguments=arguments, metrics=metrics
)
method = lambda body: METHOD.format(body=body)
layer = lambda body: WITH_LAYER.format(body=body)
whole_layer = lambda body: layer(body).replace('hidden(self, x_BTD)', '__call__(self, x_BTD, *_)')

# code, a text of the line that must be named, and a part of the message
MISTAKES = {
  'shape': (
    loss('return outputs.params["embedding"]["emb_var"] @ batch["ids"]'), '@ batch', 'shape'
  ),
  'pair': (loss('return jnp.ones(()), {}'), 'def __call__', 'must return a scalar'),
  'no scalar': (loss('return batch["weights"]'), 'def __call__', 'must return a scalar'),
  'metric': (loss(metrics='{"a": jnp.ones(3)}'), 'def metrics', "the metric 'a'"),
  'reserved': (loss(metrics='{"step": 1.0}'), 'def metrics', "named 'step', a name that"),
  'signature': (loss('return 1', arguments='outputs'), 'def __call__', 'TypeError'),
  'name': (loss('return outputs.params["embeding"]'), 'embeding', 'KeyError'),
  'incomplete': (
    loss().replace('__call__', 'call'), 'class MyLoss', "Can't instantiate abstract class MyLoss",
  ),
  'axis': (
    layer('return x_BTD * param(self, "s", jax.nn.initializers.ones, (1,), ["wide"])'),
    'param(self', 'no sharding rule',
  ),
  'layer': (layer('return x_BTD @ jnp.ones((3, 3))'), '@ jnp.ones', 'TypeError'),
  'shape of a result': (layer('return self.up(x_BTD, "ffn_layer1")[..., :-1]'), 'class Layer', ''),
  'width': (whole_layer('return x_BTD[..., ::2]'), 'class Layer', 'at: Tracing the model'),
  'nothing in a stack': (
    whole_layer('pass').replace('NUM_LAYERS = 1', 'USE_REPEATED_LAYER = True'),
    'class Layer', "'NoneType'",
  ),
  'optax object': (
    method('def transformation(self): return optax.lion(1e-3)'), 'def transformation',
    'config(FUNCTION',
  ),
  'optimizer': (
    method('def optimizer(self): return config(optax.lion, 1e-3)'), 'def optimizer',
    'override transformation()',
  ),
  'no transformation': (
    method('def transformation(self): pass'), 'def transformation', 'returns nothing'
  ),
  'no task': (method('def task(self): super().task()'), 'def task', 'returns nothing'),
  'no model': (method('def model(self): super().model()'), 'def model', 'returns nothing'),
  'too few arguments': (
    method('def transformation(self, schedule): pass'), 'def transformation', 'TypeError'
  ),
  'callbacks': (method('def callbacks(self): return Bad()'), 'def callbacks', 'a list of'),
  'build': (
    method('def transformation(self): return config(optax.adamw, 1e-3, b1="x", learning_rte=3)'),
    'def transformation', 'learning_rte',
  ),
  'import': ('import numpy.nothing', 'import numpy.nothing', 'ModuleNotFoundError'),
  'syntax': ('def f(:\n  pass\nclass Mine: pass', 'def f(:', 'SyntaxError'),
  'at import': ('x = 1 / 0', 'x = 1 / 0', 'ZeroDivisionError'),
}  # fmt: skip


def reported(tmp_path, monkeypatch, capsys, code, *flags) -> str:
  """Runs `paxlite train mistake_N.Mine` in this process; returns what it prints on stderr."""
  name = f'mistake_{abs(hash((code, flags)))}'
  (tmp_path / f'{name}.py').write_text(textwrap.dedent(code))
  monkeypatch.syspath_prepend(str(tmp_path))
  folder = f'--job_log_dir={tmp_path / "run"}'
  assert main.main(['x', f'--fdl_config={name}.Mine', folder, *flags]) in (1, 2)
  return capsys.readouterr().err


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_in_ones_own_code_is_named_in_a_few_lines(name, tmp_path, monkeypatch, capsys):
  code, line, message = MISTAKES[name]
  printed = reported(tmp_path, monkeypatch, capsys, code)
  assert len(printed.splitlines()) <= 8, printed
  assert 'defect of paxlite' not in printed
  assert message in printed
  number = next(i for i, text in enumerate(code.splitlines(), 1) if line in text)
  assert f'.py, line {number}' in printed, printed


def test_an_error_says_what_was_done_and_where_the_traceback_is(tmp_path, monkeypatch, capsys):
  with pytest.raises(ZeroDivisionError) as found, doing('outer'), doing('Reading numbers'):
    1 / 0  # noqa: B018
  assert 'paxlite was at: Reading numbers' in user_code.report(found.value)
  monkeypatch.setenv(user_code.FULL, '1')
  user_code.print_error(found.value, 'a defect')
  printed = capsys.readouterr().err
  assert 'Traceback (most recent call last)' in printed
  assert 'a defect' not in printed
  monkeypatch.delenv(user_code.FULL)
  user_code.print_error(found.value, 'a defect', tmp_path)
  assert f'is in {tmp_path / "traceback.txt"}.' in capsys.readouterr().err
  assert 'ZeroDivisionError' in (tmp_path / 'traceback.txt').read_text()


def test_the_traceback_is_not_written_through_a_link(tmp_path, capsys):
  folder = tmp_path / 'run'
  folder.mkdir()
  (tmp_path / 'mine').write_text('kept')
  (folder / 'traceback.txt').symlink_to(tmp_path / 'mine')
  try:
    exec(compile('1 / 0', str(tmp_path / 'own.py'), 'exec'))
  except ZeroDivisionError as e:
    user_code.print_error(e, '', folder)
  assert f'is in {folder}/traceback.txt' in capsys.readouterr().err
  assert (tmp_path / 'mine').read_text() == 'kept'
  assert 'ZeroDivisionError' in (folder / 'traceback.txt').read_text()


def test_an_object_that_answers_for_any_name_does_not_hide_an_error(monkeypatch):
  class Anything:
    def __getattr__(self, name):
      return self

    def __call__(self):
      pass

  module = types.ModuleType('own_lazy_module')
  module.__file__ = '/somewhere/own_lazy_module.py'
  module.lazy_call = Anything()  # type: ignore[attr-defined]
  monkeypatch.setitem(sys.modules, module.__name__, module)
  assert (
    user_code.frame_of(TypeError('lazy_call() takes 1 positional argument but 2 were given'))
    is None
  )
  assert 'Anything' in user_code.place_of(module.lazy_call)


def test_an_error_of_paxlites_keeps_its_traceback(capsys):
  try:
    user_code.place_of(None.missing)
  except AttributeError as e:
    e.__traceback__ = None  # no line of a user's is in it
    user_code.print_error(e, 'a defect')
  assert 'a defect' in capsys.readouterr().err


@pytest.mark.parametrize(
  'words', [['paxlite', 'list'], ['paxlite.main', '--help'], ['paxlite', 'show', 'TinyGPT']]
)
def test_python_without_docstrings_is_refused_in_one_line(words):
  done = subprocess.run(
    [sys.executable, '-OO', '-m', *words], capture_output=True, text=True, check=False,
    cwd=runs.ROOT,
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stderr.startswith('error: Python was started with -OO')
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('words', [['paxlite', 'list'], ['paxlite.main', '--mode=train']])
def test_a_python_without_the_packages_is_named_in_one_line(words):
  without_packages = [sys.executable, '-S', '-m', *words]
  done = subprocess.run(
    without_packages, capture_output=True, text=True, check=False,
    cwd=runs.ROOT, env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)},
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stderr.startswith(f'error: {sys.executable} lacks jax, flax, optax, orbax, fiddle: ')
  assert len(done.stderr.splitlines()) == 1
