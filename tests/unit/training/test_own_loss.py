"""A loss of one's own: its value and its gradients do not depend on the number of microbatches."""

import dataclasses
import math
import os
import pathlib
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import meta

from paxlite import main
from paxlite.core.errors import UserError
from paxlite.data.synthetic import SyntheticRows
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.description import dry_run
from paxlite.optim.optimizers import Optimizer
from paxlite.programs import library
from paxlite.training.callbacks import Callback
from paxlite.training.metrics import Weighted, over_microbatches
from paxlite.training.own_loss import RunningMean
from paxlite.training.task import Task
from tests.support import runs

ROWS, LENGTH, VOCABULARY = 8, 6, 5


class Model:
  """Stands for a language model: logits are rows of a table."""


@dataclasses.dataclass(frozen=True)
class Table(Task):
  """A Task of one table of logits, whose loss is its own."""

  kind: str = 'tokens'

  def loss(self, params, batch, rng=None, overwritten=None, taps=None):
    table = params['table']
    logits = jax.nn.log_softmax(table[batch['ids']])
    xent = -jnp.take_along_axis(logits, batch['labels'][..., None], -1)[..., 0]
    weights = batch['weights']
    if self.kind == 'tokens':  # not a number where a microbatch has no target
      return (xent * weights).sum() / weights.sum(), {
        'entropy': (logits * weights[..., None]).sum()
      }
    if self.kind == 'penalty':
      loss = (xent * weights).sum() / weights.sum() + 0.1 * (table**2).sum()
      return loss, {'norm': Weighted((table**2).sum(), weights.sum())}
    rows = weights.max(1)  # each row counts once, however many targets it has
    of_rows = (xent * weights).sum(1) / jnp.maximum(weights.sum(1), 1)
    loss = (of_rows * rows).sum() / jnp.maximum(rows.sum(), 1)
    return loss, {'total_loss': Weighted(jnp.zeros(()), rows.sum())}


def table_and_batch():
  rng = np.random.default_rng(0)
  weights = (rng.random((ROWS, LENGTH)) < np.linspace(0.2, 1, ROWS)[:, None]).astype('float32')
  weights[1::4] = 0  # the second of four microbatches has no target
  weights[2] = 0
  draw = lambda: rng.integers(0, VOCABULARY, (ROWS, LENGTH))
  params = {'table': jnp.asarray(rng.normal(size=(VOCABULARY, VOCABULARY)), jnp.float32)}
  return params, {'ids': draw(), 'labels': draw(), 'weights': weights}


@pytest.mark.parametrize('kind', ['tokens', 'penalty', 'rows'])
def test_one_two_and_four_microbatches_agree(kind):
  params, batch = table_and_batch()
  task = Table(Model(), Optimizer(optax.sgd(1.0)), kind=kind)
  expected, gradients = jax.value_and_grad(lambda p: task.loss(p, batch)[0])(params)
  for n in (1, 2, 4):
    of_n = dataclasses.replace(task, num_microbatches=n)
    grads, _, metrics = jax.jit(of_n.grads)(params, batch, None)
    assert float(metrics['total_loss'].value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(grads['table'], gradients['table'], atol=1e-6)
    assert float(metrics['num_predictions'].value) == batch['weights'].sum()
    assert all(np.isfinite(m.value) for m in metrics.values())


def test_a_batch_without_any_target_has_the_mean_of_the_losses():
  params, batch = table_and_batch()
  batch['weights'] = np.zeros_like(batch['weights'])
  for kind, expected in (('rows', 0.0), ('tokens', np.nan)):
    task = Table(Model(), Optimizer(optax.sgd(1.0)), num_microbatches=2, kind=kind)
    grads, _, metrics = jax.jit(task.grads)(params, batch, None)
    np.testing.assert_equal(float(metrics['total_loss'].value), expected)
    assert np.isfinite(grads['table']).all() == (kind == 'rows')


def test_a_running_mean_is_the_mean():
  mean = RunningMean.of(jnp.zeros(3))
  parts = [(np.full(3, np.nan), 0.0), (np.arange(3.0), 1.0), (np.ones(3), 3.0), (np.ones(3), 0.0)]
  for part, weight in parts:
    mean = mean.with_part(jnp.asarray(part, jnp.float32), jnp.float32(weight))
  np.testing.assert_allclose(mean.mean, (np.arange(3.0) + 3) / 4)
  metric = over_microbatches('x', Weighted(jnp.array([jnp.nan, 2e-8]), jnp.array([0.0, 1e-8])))
  assert float(metric.value) == pytest.approx(2e-8)


class Smoothed(Task):
  """Adds a penalty, as docs/library.md shows; the metric of the loss is left as it was."""

  def loss(self, params, batch, rng=None, overwritten=None, **taps):
    loss, metrics = super().loss(params, batch, rng, overwritten, **taps)
    return loss + 0.01 * optax.tree.norm(params['embedding']) ** 2, metrics | {'one': 1.0}


class Deaf(Task):
  def loss(self, params, batch, rng=None, overwritten=None, taps=None):
    return super().loss(params, batch, rng, overwritten)


def language_model():
  e = TinyGPT(NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, VOCAB_SIZE=32, PACKED_INPUT=False)
  task = fdl.build(e.task())
  params = jax.eval_shape(task.init_params, jax.random.key(0))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype('float32') / 4, meta.unbox(params)
  )
  ids = rng.integers(0, 32, (4, 8))
  weights = (rng.random((4, 8)) < 0.5).astype('float32')
  return task, params, {'ids': ids, 'labels': ids, 'weights': weights}


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'gradient_dtype': 'bfloat16'},
    pytest.param({'mean_over_padding': True}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_penalty_on_parameters_reaches_their_gradients(changes):
  task, params, batch = language_model()
  make = lambda cls, n: cls(task.model, task.optimizer, n, **changes)
  run = lambda task: jax.jit(task.grads)(params, batch, None)
  plain, one, two = run(make(Task, 1)), run(make(Smoothed, 1)), run(make(Smoothed, 2))
  name, of = 'emb_var', lambda grads: np.asarray(grads[0]['embedding']['emb_var'], 'float32')
  atol = 1e-6 if not changes.get('gradient_dtype') else 2e-2
  np.testing.assert_allclose(of(one), of(plain) + 0.02 * params['embedding'][name], atol=atol)
  np.testing.assert_allclose(of(two), of(one), atol=atol)
  losses = [float(x[2]['total_loss'].value) for x in (one, two)]
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)
  assert losses[0] > float(plain[2]['total_loss'].value) + 0.01


def test_a_loss_that_drops_its_taps_is_refused():
  task, params, batch = language_model()
  deaf = Deaf(task.model, task.optimizer, gradient_dtype='bfloat16')
  with pytest.raises(UserError, match='passes its argument `taps` on'):
    jax.eval_shape(deaf.grads, params, batch, None)


def test_initial_values_of_ones_own_are_those_of_a_run():
  class Zeros(Task):
    def init_params(self, rng):
      return jax.tree.map(jnp.zeros_like, super().init_params(rng))

  task, *_ = language_model()
  state = jax.jit(Zeros(task.model, task.optimizer).init)(jax.random.key(0))
  assert not any(x.any() for x in jax.tree.leaves(state.params))


class Few(Task):
  """A loss that reports nothing of its own."""

  def loss(self, params, batch, **rest):
    return super().loss(params, batch, **rest)[0] + 3, {}


class FailingCallback(Callback):
  def on_evaluation(self, state, step, evaluations, summaries):
    raise ConnectionError('no network')


class FailingRows(SyntheticRows):
  def read(self, indices):
    if os.environ.get('FAILING_ROWS'):
      raise RuntimeError('no more rows')
    return super().read(indices)


class Whole(TinyGPT):
  """A run with a loss that has no metrics."""

  NUM_LAYERS = 1
  MODEL_DIMS = 16
  NUM_HEADS = 2
  MAX_STEPS = 2
  EVAL_INTERVAL_STEPS = 1
  MAX_EVAL_BATCHES = 1
  NUM_MICROBATCHES = 2

  def task(self):
    task = super().task()
    fdl.update_callable(task, Few)
    return task

  def eval_inputs(self):
    cfg = self.train_input()
    cfg.max_eval_batches = 1
    return {'same': cfg}


class Failing(Whole):
  EVAL_INTERVAL_STEPS = 2

  def callbacks(self):
    return [FailingCallback()]

  def train_input(self):
    cfg = super().train_input()
    fdl.update_callable(cfg.source, FailingRows)
    return cfg


def test_a_run_reports_and_evaluates_a_loss_without_metrics(tmp_path, capsys):
  e = Whole()
  e.validate()
  assert 'parameters' in dry_run(e)
  found = library.train(e, tmp_path / 'run')
  assert min(found.metrics['loss']) > 6
  assert min(found.evaluations['total_loss']) > 6
  assert 'avg_xent' not in found.evaluations
  assert 'eval same at step 2: loss 7.' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('code', 'error', 'saved'),
  [
    ('raise ConnectionError', 'ConnectionError: no network', True),
    ('raise RuntimeError', 'RuntimeError: no more rows', False),
  ],
)
def test_an_error_in_a_callback_or_in_data_names_its_line(
  tmp_path, capsys, monkeypatch, code, error, saved
):
  if not saved:
    monkeypatch.setenv('FAILING_ROWS', '1')
  name = f'{__name__}.Failing'
  assert main.main(['x', f'--fdl_config={name}', f'--job_log_dir={tmp_path}']) == 1
  printed = [line for line in capsys.readouterr().err.splitlines() if 'WARNING' not in line]
  source = pathlib.Path(__file__).read_text().splitlines()
  number = next(i for i, line in enumerate(source, 1) if line.strip().startswith(code))
  assert f'{__file__}, line {number}, in Failing' in printed[0]
  assert error in printed[2]
  assert len(printed) <= 8
  assert bool(list(tmp_path.glob('checkpoints/checkpoint_*2'))) == saved


def code_of_the_page() -> str:
  page = (pathlib.Path(main.__file__).parents[1] / 'docs' / 'library.md').read_text()
  return next(c for c in re.findall(r'```python\n(.*?)```', page, re.DOTALL) if 'my_parts' in c)


@pytest.mark.slow
def test_the_parts_of_the_page_hold_on_eight_devices(tmp_path):
  (tmp_path / 'my_parts.py').write_text(code_of_the_page())
  found = {}
  for mesh, microbatches in (([1, 1, 1], 1), ([1, 8, 1], 1), ([1, 4, 2], 2), ([2, 2, 2], 4)):
    folder, devices = tmp_path / f'{mesh} {microbatches}', math.prod(mesh)
    runs.run(
      folder, f'--fdl.ICI_MESH_SHAPE={mesh}', f'--fdl.NUM_MICROBATCHES={microbatches}',
      f'--fdl.PERCORE_BATCH_SIZE={16 / devices}', '--fdl.MAX_STEPS=5', '--fdl.LR_COS_WARMUP=1',
      '--fdl.SUMMARY_INTERVAL_STEPS=1', '--fdl.FPROP_DTYPE=float32', devices=devices,
      config='my_parts.MyParts', env={'PYTHONPATH': str(tmp_path)},
    )  # fmt: skip
    found[folder.name] = list(runs.losses(folder).values())
  one, *others = found.values()
  assert len(one) == 5
  assert one[-1] < one[0]
  for losses in others:
    assert losses == pytest.approx(one, rel=1e-5), found


def test_the_parts_of_the_page_hold_with_microbatches_and_lora():
  """The code of docs/library.md, with its loss, its optimizer and its layer."""
  code = code_of_the_page().replace('@paxlite.register\n', '')
  scope: dict = {'__name__': 'my_parts'}
  exec(compile(code, 'my_parts', 'exec'), scope)
  small = dict(NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, VOCAB_SIZE=32, MAX_SEQ_LEN=8)
  e = scope['MyParts'](**small, CLIP_GRADIENT_NORM_TO_VALUE=0.5, USE_LORA=True)
  task = fdl.build(e.task())
  data = fdl.build(e.train_input())
  batch = next(iter(data.train_batches(0, slice(0, data.batch_size))))
  rng = np.random.default_rng(0)
  params = jax.eval_shape(task.init_params, jax.random.key(0))
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype('float32'), meta.unbox(params))
  trainable, _ = task.optimizer.split(params)
  assert 0 < len(jax.tree.leaves(trainable)) < len(jax.tree.leaves(params))
  assert task.optimizer.clip_gradient_norm == 0.5
  found = []
  for n in (1, 2, 4):
    grads = dataclasses.replace(task, num_microbatches=n).grads
    grads, _, metrics = jax.jit(grads)(params, batch, None)
    assert jax.tree.structure(grads) == jax.tree.structure(trainable)
    found.append(float(metrics['total_loss'].value))
    assert found[-1] > float(metrics['avg_xent'].value) + 0.1
  assert found == pytest.approx([found[0]] * 3, rel=1e-5)
