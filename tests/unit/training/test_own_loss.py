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
from flax import linen as nn
from flax.linen import meta

from paxlite import main
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.synthetic import SyntheticRows
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.description import dry_run
from paxlite.layers.cross_entropy import cross_entropy
from paxlite.losses.loss import Loss, OnceABatch
from paxlite.losses.metrics import Mean, Weighted, over_microbatches
from paxlite.losses.token_losses import CrossEntropy, Uniform, ZLoss
from paxlite.optim.optimizers import Optimizer
from paxlite.programs import library
from paxlite.training.callbacks import Callback
from paxlite.training.microbatch_loop import in_microbatches
from paxlite.training.task import Task
from tests.support import runs

ROWS, LENGTH, VOCABULARY = 8, 6, 5


class Table(nn.Module):
  """A language model that is a table of logits."""

  def setup(self):
    self.table = self.param('table', nn.initializers.normal(), (VOCABULARY, VOCABULARY))

  def hidden(self, ids, positions=None, segments=None):
    return self.table[ids]

  def token_losses(self, x, labels):
    return cross_entropy(x, labels, 0.0)

  def logits(self, x):
    return x


@dataclasses.dataclass(frozen=True)
class Penalty(OnceABatch):
  reads_params = True

  def __call__(self, outputs, batch):
    return jnp.square(outputs.params['table']).sum()


@dataclasses.dataclass(frozen=True)
class OverRows(Loss):
  """The mean over rows of the mean over their targets."""

  def weight(self, batch):
    return batch['weights'].max(1).sum()

  def __call__(self, outputs, batch):
    weights = batch['weights']
    return ((outputs.tokens.xent * weights).sum(1) / jnp.maximum(weights.sum(1), 1)).sum()

  def metrics(self, outputs, batch):
    return {'entropy': -outputs.log_probs.mean(), 'num_rows': self.weight(batch), 'one': 1}


LOSSES = {
  'tokens': {'xent': CrossEntropy()}, 'padding': {'xent': CrossEntropy(over_padding=True)},
  'penalty': {'xent': CrossEntropy(), 'norm': Penalty(0.1)}, 'rows': {'rows': OverRows(2.0)},
  'z_loss': {'xent': CrossEntropy(), 'z': ZLoss(0.1)},
  'smoothed': {'xent': CrossEntropy(0.9), 'uniform': Uniform(0.1)},
}  # fmt: skip


def expected_loss(kind, table, batch):
  """The loss of the whole batch, written without the library."""
  logits, weights = table[batch['ids']], batch['weights']
  log_z = jax.nn.logsumexp(logits, -1)
  xent = log_z - jnp.take_along_axis(logits, batch['labels'][..., None], -1)[..., 0]
  mean = lambda x: (x * weights).sum() / weights.sum()
  rows = weights.max(1)
  match kind:
    case 'tokens':
      return mean(xent)
    case 'padding':
      return (xent * weights).sum() / (rows.sum() * LENGTH)
    case 'penalty':
      return mean(xent) + 0.1 * (table**2).sum()
    case 'rows':
      of_rows = (xent * weights).sum(1) / jnp.maximum(weights.sum(1), 1)
      return 2 * (of_rows * rows).sum() / rows.sum()
    case 'z_loss':
      return mean(xent) + 0.1 * mean(log_z**2)
    case 'smoothed':
      labels = 0.9 * jax.nn.one_hot(batch['labels'], VOCABULARY) + 0.1 / VOCABULARY
      return mean(-(labels * jax.nn.log_softmax(logits)).sum(-1))


def table_and_batch():
  rng = np.random.default_rng(0)
  weights = (rng.random((ROWS, LENGTH)) < np.linspace(0.2, 1, ROWS)[:, None]).astype('float32')
  weights[1::4] = 0  # the second of four microbatches has no target
  weights[2] = 0
  draw = lambda: rng.integers(0, VOCABULARY, (ROWS, LENGTH))
  params = {'table': jnp.asarray(rng.normal(size=(VOCABULARY, VOCABULARY)), jnp.float32)}
  return params, {'ids': draw(), 'labels': draw(), 'weights': weights}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('kind', LOSSES)
def test_one_two_and_four_microbatches_agree(kind):
  params, batch = table_and_batch()
  task = Task(Table(), Optimizer(optax.sgd(1.0)), LOSSES[kind])
  of_table = lambda table: expected_loss(kind, table, batch)
  expected, gradient = jax.value_and_grad(of_table)(params['table'])
  for n in (1, 2, 4):
    of_n = dataclasses.replace(task, num_microbatches=n)
    grads, _, metrics = jax.jit(of_n.grads)(params, batch, None)
    assert float(metrics['total_loss'].value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(grads['table'], gradient, atol=1e-6)
    assert all(np.isfinite(m.value) for m in metrics.values())
    if kind == 'rows':
      assert float(metrics['num_rows'].value) == batch['weights'].max(1).sum()
      assert float(metrics['one'].value) == 1


def test_a_batch_without_any_target_has_the_loss_0():
  params, batch = table_and_batch()
  batch['weights'] = np.zeros_like(batch['weights'])
  for kind in ('rows', 'tokens', 'padding'):
    task = Task(Table(), Optimizer(optax.sgd(1.0)), LOSSES[kind], num_microbatches=2)
    grads, _, metrics = jax.jit(task.grads)(params, batch, None)
    assert float(metrics['total_loss'].value) == 0
    assert not grads['table'].any()


def test_rows_that_belong_together_stay_in_one_microbatch():
  rows = jnp.arange(16)[:, None]
  found = in_microbatches({'ids': rows}, 2, rows_per_example=2)['ids'][..., 0]
  assert found.tolist() == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
  found = in_microbatches({'ids': rows}, 4)['ids'][..., 0]
  assert found[1].tolist() == [1, 5, 9, 13]


def test_counts_maxima_and_means_of_microbatches():
  of = lambda value, weight: Weighted(jnp.array(value), jnp.array(weight))
  metric = over_microbatches('x', of([jnp.nan, 2e-8], [0.0, 1e-8]))
  assert float(metric.value) == pytest.approx(2e-8)
  assert float(over_microbatches('num_x', of([2.0, 3.0], [1.0, 1.0])).value) == 5
  assert float(over_microbatches('max_x', of([2.0, 3.0], [9.0, 1.0])).value) == 3
  mean = Mean()
  for value in (2.0, 4.0):
    mean.add({'num_x': Weighted(value, 1.0), 'x': Weighted(value, value), 'y': Weighted(value, 0)})
  assert mean.result() == {'num_x': 6.0, 'x': pytest.approx(20 / 6), 'y': 0.0}


@dataclasses.dataclass(frozen=True)
class Bad(Loss):
  """A loss that is wrong in one of several ways."""

  kind: str = ''

  def __call__(self, outputs, batch):
    match self.kind:
      case 'array':
        return outputs.tokens.xent
      case 'none':
        return None
      case 'params':
        return outputs.params['table'].sum()
      case 'reference':
        return outputs.reference.log_probs.sum()
    return outputs.tokens.xent.sum()

  def weight(self, batch):
    return batch['weights'].sum(1) if self.kind == 'weight' else batch['weights'].sum()

  def metrics(self, outputs, batch):
    return {
      'name': {'step': jnp.ones(())}, 'vector': {'x': outputs.tokens.xent}, 'list': [1.0],
      'twice': {'bad': 1.0},
    }.get(self.kind, {})  # fmt: skip


@pytest.mark.parametrize(
  ('kind', 'message'),
  [
    ('array', r'test_own_loss.py, line \d+: Bad.__call__ returns an array float32\[8, 6\] for the'),
    ('none', r'Bad.__call__ returns None for the loss .bad.'),
    ('params', 'must state `reads_params = True`'),
    ('reference', 'the experiment has no reference: override its method'),
    ('name', r"returns a metric named 'step', a name that the records of evaluations use"),
    ('vector', r"returns an array float32\[8, 6\] in the metric 'x'"),
    ('list', 'returns an object of the type list, and must return a dict'),
    ('twice', r"'bad' names two metrics, or a metric and a loss"),
    ('weight', r'Bad.weight returns an array float32\[8\] for the loss .bad.'),
  ],
)
def test_what_a_loss_returns_is_checked(kind, message):
  params, batch = table_and_batch()
  task = Task(Table(), Optimizer(optax.sgd(1.0)), {'bad': Bad(kind=kind)})
  with pytest.raises(UserError, match=message):
    jax.eval_shape(task.grads, params, batch, None)


@dataclasses.dataclass(frozen=True)
class Weightless(Loss):
  """A sum whose weight is 0."""

  def weight(self, batch):
    return 0

  def __call__(self, outputs, batch):
    return 100 * outputs.tokens.xent.sum()


@pytest.mark.parametrize('n', [1, 2])
def test_a_sum_without_weight_does_not_count(n):
  params, batch = table_and_batch()
  make = lambda losses: Task(Table(), Optimizer(optax.sgd(1.0)), losses, num_microbatches=n)
  plain = make(LOSSES['tokens']).grads(params, batch, None)
  found = make(LOSSES['tokens'] | {'none': Weightless()}).grads(params, batch, None)
  np.testing.assert_array_equal(found[0]['table'], plain[0]['table'])
  assert float(found[2]['none'].value) == 0
  assert float(found[2]['total_loss'].value) == float(plain[2]['total_loss'].value)


class Margins(CrossEntropy):
  larger_is_better = ('margin',)

  def metrics(self, outputs, batch):
    return {'margin': outputs.log_probs.mean()}


def test_which_metrics_are_better_if_they_are_larger():
  task = Task(Table(), Optimizer(optax.sgd(1.0)), {'xent': Margins(), 'accuracy': CrossEntropy()})
  better = {
    k: task.larger_is_better(k) for k in ('margin', 'xent', 'accuracy', 'acc', 'total_loss')
  }
  assert better == {
    'margin': True,
    'xent': False,
    'accuracy': False,
    'acc': True,
    'total_loss': False,
  }
  assert Margins().of_evaluation(2.0, 3.0, {}, 4.0)['bits_per_byte'] == pytest.approx(
    0.5 / math.log(2)
  )


def test_losses_of_a_task_are_checked():
  make = lambda losses: Task(Table(), Optimizer(optax.sgd(1.0)), losses)
  for losses, message in (
    ({}, 'must be a dict of losses by name'),
    ({'x': print}, "the loss 'x' is an object of the type builtin_function"),
    ({'total_loss': CrossEntropy()}, 'a name that the sum of all losses has'),
    ({'num_pairs': CrossEntropy()}, 'names with max_ or num_ are for metrics'),
    ({'max_margin': CrossEntropy()}, 'names with max_ or num_ are for metrics'),
  ):
    with pytest.raises(UserError, match=message):
      make(losses)

  class WithLoss(Task):
    def loss(self, params, batch):
      return 0

  with pytest.raises(UserError, match='WithLoss has a method `loss`, which is never called'):
    WithLoss(Table(), Optimizer(optax.sgd(1.0)), LOSSES['tokens'])


def language_model(**values):
  small = dict(NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, VOCAB_SIZE=32, PACKED_INPUT=False)
  e = TinyGPT(**small | values)
  task = fdl.build(e.build_task())
  params = jax.eval_shape(task.init_params, jax.random.key(0))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype('float32') / 4, meta.unbox(params)
  )
  ids = rng.integers(0, 32, (4, 8))
  weights = (rng.random((4, 8)) < 0.5).astype('float32')
  return task, params, {'ids': ids, 'labels': ids, 'weights': weights}


@dataclasses.dataclass(frozen=True)
class EmbeddingNorm(OnceABatch):
  """As docs/library.md shows."""

  reads_params = True

  def __call__(self, outputs, batch):
    return optax.tree.norm(outputs.params['embedding']) ** 2


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_penalty_on_parameters_reaches_their_gradients(dtype):
  task, params, batch = language_model(GRADIENT_DTYPE=dtype)
  with_norm = dict(task.losses) | {'norm': EmbeddingNorm(0.01)}
  make = lambda losses, n: dataclasses.replace(task, losses=losses, num_microbatches=n)
  run = lambda task: jax.jit(task.grads)(params, batch, None)
  plain, one, two = run(task), run(make(with_norm, 1)), run(make(with_norm, 2))
  name, of = 'emb_var', lambda grads: np.asarray(grads[0]['embedding']['emb_var'], 'float32')
  atol = 1e-6 if dtype == 'float32' else 2e-2
  np.testing.assert_allclose(of(one), of(plain) + 0.02 * params['embedding'][name], atol=atol)
  np.testing.assert_allclose(of(two), of(one), atol=atol)
  losses = [float(x[2]['total_loss'].value) for x in (one, two)]
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)
  assert losses[0] > float(plain[2]['total_loss'].value) + 0.01


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('chunks', [1, 4])
@pytest.mark.parametrize('cap', [0.0, 3.0])
def test_z_loss_and_smoothing_equal_formulas_of_the_logits(chunks, cap):
  task, params, batch = language_model(
    NUM_LOSS_CHUNKS=chunks, SOFTMAX_CAP_LOGITS=cap, LABEL_SMOOTHING=0.2, Z_LOSS_WEIGHT=0.5
  )

  def formula(params):
    logits = task.model.apply({'params': params}, batch['ids'])
    log_p = jax.nn.log_softmax(logits)
    labels = 0.8 * jax.nn.one_hot(batch['labels'], 32) + 0.2 / 32
    each = -(labels * log_p).sum(-1) + 0.5 * jax.nn.logsumexp(logits, -1) ** 2
    return (each * batch['weights']).sum() / batch['weights'].sum()

  expected, gradients = jax.jit(jax.value_and_grad(formula))(params)
  grads, _, metrics = jax.jit(task.grads)(params, batch, None)
  assert float(metrics['total_loss'].value) == pytest.approx(float(expected), rel=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, gradients)


def test_initial_values_of_ones_own_are_those_of_a_run():
  class Zeros(Task):
    def init_params(self, rng):
      return jax.tree.map(jnp.zeros_like, super().init_params(rng))

  task, *_ = language_model()
  state = jax.jit(Zeros(task.model, task.optimizer, task.losses).init)(jax.random.key(0))
  assert not any(x.any() for x in jax.tree.leaves(state.params))


@dataclasses.dataclass(frozen=True)
class Few(Loss):
  """A loss that reports nothing of its own."""

  def __call__(self, outputs, batch):
    return ((outputs.tokens.xent + 3) * batch['weights']).sum()


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

  def losses(self):
    return {'few': config(Few)}

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


@pytest.mark.slow
def test_a_run_reports_and_evaluates_a_loss_without_metrics(tmp_path, capsys):
  e = Whole()
  e.validate()
  assert 'parameters' in dry_run(e)
  found = library.train(e, tmp_path / 'run')
  assert min(found.metrics['loss']) > 6
  assert min(found.evaluations['total_loss']) > 6
  assert 'avg_xent' not in found.evaluations
  assert 'eval same at step 2: loss 7.' in capsys.readouterr().out


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
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


@pytest.mark.slow
def test_the_parts_of_the_page_hold_with_microbatches_and_lora():
  """The code of docs/library.md, with its loss, its optimizer and its layer."""
  code = code_of_the_page().replace('@paxlite.register\n', '')
  scope: dict = {'__name__': 'my_parts'}
  exec(compile(code, 'my_parts', 'exec'), scope)
  small = dict(NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, VOCAB_SIZE=32, MAX_SEQ_LEN=8)
  e = scope['MyParts'](**small, CLIP_GRADIENT_NORM_TO_VALUE=0.5, USE_LORA=True)
  task = fdl.build(e.build_task())
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
