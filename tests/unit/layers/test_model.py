"""Variants of the model that must agree."""

import dataclasses
import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.experiments.glam.layers import RelativeBias
from paxlite.experiments.gpt import GPT126M
from paxlite.layers.attention import cpu_attention
from paxlite.layers.attention.attention import DotProductAttention
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.precision.weight_matmul import summed_product, weight_matmul
from paxlite.layers.remat import CheckpointPolicy
from paxlite.layers.transformer import TransformerBlock
from paxlite.training.task import Task

SMALL = dict(
  NUM_LAYERS=1, MODEL_DIMS=32, NUM_HEADS=4, VOCAB_SIZE=61, MAX_SEQ_LEN=16, FPROP_DTYPE='float32',
  ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1],
)  # fmt: skip


def make(**overrides) -> Task:
  experiment = GPT126M(**{**SMALL, **overrides})
  experiment.validate()
  return fdl.build(experiment.build_task())


def params_of(task, seed=0):
  """Returns random parameters, because initial biases and scales of zero would hide errors."""
  params = meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), params)


def batch_of(batch_size=4, length=16, vocab=61, packed=False, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(vocab, size=(batch_size, length + 1))
  batch = {
    'ids': jnp.asarray(tokens[:, :-1]),
    'labels': jnp.asarray(tokens[:, 1:]),
    'weights': jnp.asarray(rng.integers(2, size=(batch_size, length)), jnp.float32),
  }
  if packed:
    segment_ids = np.repeat([[1] * 5 + [2] * 8 + [0] * 3], batch_size, axis=0)
    batch['segment_ids'] = jnp.asarray(segment_ids)
    batch['segment_pos'] = jnp.asarray([[*range(5), *range(8), *range(3)]] * batch_size)
    batch['weights'] *= segment_ids > 0
  return batch


def grads_of(task, params, batch, rng=None):
  grads, _, metrics = jax.jit(task.grads)(params, batch, rng)
  return float(metrics['total_loss'].value), grads


def assert_trees_close(a, b, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def stacked(params):
  """Returns unrolled parameters in the layout of RepeatedTransformer."""
  layers = params['transformer']
  blocks = [layers[f'x_layers_{i}'] for i in range(len(layers))]
  return {**params, 'transformer': {'repeat': jax.tree.map(lambda *x: jnp.stack(x), *blocks)}}


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('packed', [pytest.param(False, marks=pytest.mark.slow), True])
def test_repeated_equals_unrolled(packed):
  unrolled, repeated = (make(NUM_LAYERS=2, USE_REPEATED_LAYER=r) for r in (False, True))
  params, batch = params_of(unrolled), batch_of(packed=packed)
  loss_u, grads_u = grads_of(unrolled, params, batch)
  loss_r, grads_r = grads_of(repeated, stacked(params), batch)
  assert loss_u == pytest.approx(loss_r, rel=1e-6)
  assert_trees_close(stacked(grads_u), grads_r, atol=1e-6, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize('policy', ['SAVE_NOTHING', 'SAVE_DOT_WITH_NO_BATCH_DIM'])
def test_repeated_layers_without_a_loop(policy):
  """The same variables, and nearly the same loss and gradients; what is not kept is recomputed."""
  values = dict(USE_REPEATED_LAYER=True, NUM_LAYERS=2, CHECKPOINT_POLICY=policy, DROPOUT_PROB=0.2)
  loop, unrolled = make(**values, UNROLL_LAYERS=[]), make(**values, UNROLL_LAYERS=['cpu'])
  params, batch, rng = params_of(loop), batch_of(), jax.random.key(3)
  shapes = jax.tree.map(lambda x: x.shape, params)
  assert shapes == jax.tree.map(lambda x: x.shape, params_of(unrolled))
  programs = [jax.jit(t.grads).lower(params, batch, rng).compile() for t in (loop, unrolled)]
  has_loop = ['transformer.layers/while' in p.as_text() for p in programs]
  assert has_loop == [True, False]
  initial = jax.jit(unrolled.init_params).lower(rng)
  assert 'transformer.layers/while' in initial.compile().as_text()  # it keeps nothing
  # XLA would undo the recomputation without a barrier
  again = re.findall(r' dot\(.*rematted_computation.*ffn_layer1', programs[1].as_text())
  assert bool(again) == (policy == 'SAVE_NOTHING')
  (grads, _, metrics), (grads_u, _, metrics_u) = (p(params, batch, rng) for p in programs)
  assert float(metrics['total_loss'].value) == pytest.approx(
    float(metrics_u['total_loss'].value), rel=1e-6
  )
  assert_trees_close(grads, grads_u, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope='module')
def plain():
  """Parameters, a batch, the loss and the gradients of the plain model."""
  params, batch = params_of(make()), batch_of()
  return params, batch, *grads_of(make(), params, batch)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('repeated', [False, True])
@pytest.mark.parametrize('policy', CheckpointPolicy.__args__)
def test_checkpoint_policies_change_no_gradient(plain, policy, repeated):
  task = make(USE_REPEATED_LAYER=repeated, CHECKPOINT_POLICY=policy)
  params, batch, loss, grads = plain
  if repeated:
    params, grads = stacked(params), stacked(grads)
  loss_p, grads_p = grads_of(task, params, batch)
  assert loss == pytest.approx(loss_p, rel=1e-6)
  assert_trees_close(grads, grads_p, atol=1e-6, rtol=1e-5)


def saved_floats(task, params, batch) -> int:
  """Returns the numbers that the forward pass keeps for the backward, besides its arguments."""
  forward = lambda p: jax.tree.leaves(jax.vjp(lambda q: task.loss_and_metrics(q, batch)[0], p))
  traced = jax.make_jaxpr(forward)(params).jaxpr
  arguments = {id(v) for v in (*traced.invars, *traced.constvars)}
  kept = {id(v): v.aval.size for v in traced.outvars if not hasattr(v, 'val')}
  return sum(size for v, size in kept.items() if v not in arguments)


@pytest.mark.slow
@pytest.mark.parametrize('repeated', [False, True])
def test_checkpoint_policies_keep_what_they_name(repeated):
  """A policy that keeps more needs more memory: nothing < 1 name < 2 names < dots < everything."""
  size = lambda policy: saved_floats(
    make(USE_REPEATED_LAYER=repeated, CHECKPOINT_POLICY=policy, NUM_LAYERS=6), params, batch
  )
  params = params_of(make(NUM_LAYERS=6, USE_REPEATED_LAYER=repeated))
  batch = batch_of()
  names = 'SAVE_NOTHING', 'SAVE_OUT_PROJ', 'SAVE_CONTEXT_AND_OUT_PROJ', 'SAVE_QKV_CONTEXT_OUT_PROJ'
  sizes = [size(n) for n in (*names, 'SAVE_DOT_ONLY', 'SAVE_EVERYTHING')]
  assert sizes == sorted(set(sizes)), sizes
  one_activation = 6 * 4 * 16 * 32
  assert sizes[1] - sizes[0] == pytest.approx(one_activation, rel=0.2)


def test_lora_keeps_the_sum_of_two_products_alone():
  """Both take a policy of products to the same memory, but for the factors' narrow products."""
  keeps = dict(CHECKPOINT_POLICY='SAVE_DOT_WITH_NO_BATCH_DIM', NUM_LAYERS=6, LORA_RANK=1)
  size = lambda **values: saved_floats(task := make(**keeps, **values), params_of(task), batch_of())
  assert size(USE_LORA=True) < 1.1 * size()


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(('dropout', 'traced'), [(0.0, 1), (0.3, 5)])
def test_equal_layers_are_traced_once_unless_they_have_random_keys(monkeypatch, dropout, traced):
  task = make(NUM_LAYERS=5, DROPOUT_PROB=dropout)
  params, batch = params_of(task), batch_of()
  calls = []
  call = TransformerBlock.__call__
  monkeypatch.setattr(TransformerBlock, '__call__', lambda *args: calls.append(1) or call(*args))
  jax.make_jaxpr(task.grads)(params, batch, jax.random.key(0) if dropout else None)
  assert len(calls) == traced


@pytest.mark.slow
def test_microbatches_change_rounding_alone():
  one, four = make(PERCORE_BATCH_SIZE=8), make(PERCORE_BATCH_SIZE=8, NUM_MICROBATCHES=4)
  params, batch = params_of(one), batch_of(batch_size=8)
  loss, grads = grads_of(one, params, batch)
  loss_4, grads_4 = grads_of(four, params, batch)
  assert loss == pytest.approx(loss_4, rel=1e-6)
  assert_trees_close(grads, grads_4, atol=1e-6, rtol=1e-5)
  metrics = [jax.jit(t.grads)(params, batch, None)[2] for t in (one, four)]
  for name, m in metrics[0].items():
    assert float(m.value) == pytest.approx(float(metrics[1][name].value), rel=1e-5), name


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  'overrides',
  [
    dict(SEPARATE_EMBEDDING=True),
    # chunks of 61 ids are of unequal size; capped logits and a bias have gradients of their own
    dict(SEPARATE_EMBEDDING=False, USE_SOFTMAX_BIAS=True, SOFTMAX_CAP_LOGITS=2.0, INIT_STD=0.5),
  ],
)
def test_loss_chunks_change_rounding_alone(overrides):
  whole, chunked = (make(NUM_LOSS_CHUNKS=n, **overrides) for n in (1, 4))
  params, batch = params_of(whole), batch_of()
  loss, grads = grads_of(whole, params, batch)
  loss_c, grads_c = grads_of(chunked, params, batch)
  assert loss == pytest.approx(loss_c, rel=1e-6)
  assert_trees_close(grads, grads_c, atol=1e-6, rtol=1e-5)


def test_loss_chunks_never_hold_all_logits():
  task = make(NUM_LOSS_CHUNKS=4)
  hlo = jax.jit(task.grads).lower(params_of(task), batch_of(), None).as_text()
  assert '4x16x61xf32' not in hlo
  assert '4x16x16xf32' in hlo
  assert '4x16x61xf32' in jax.jit(make().grads).lower(params_of(make()), batch_of(), None).as_text()


def test_a_loss_chunk_reads_its_part_of_the_head_alone():
  """FSDP would gather all that it reads, and reduce the gradient of all of it, in each chunk."""
  task = make(NUM_LOSS_CHUNKS=4)
  jaxpr = jax.make_jaxpr(task.grads)(params_of(task), batch_of(), None)
  read = [v.shape for scan in scans(jaxpr.jaxpr) for v in scan.params['jaxpr'].in_avals]
  assert read.count((1, 16, 32)) == 2  # forward and backward; 61 ids of width 32
  assert not {(61, 32), (64, 32), (1, 64, 32), (4, 1, 16, 32)} & set(read)


def test_repeated_layers_keep_little_of_activations_and_norms():
  """Of [L, B, T, F], SAVE_EVERYTHING keeps only the input and the output of the activation."""
  keeps = dict(CHECKPOINT_POLICY='SAVE_EVERYTHING', NUM_LAYERS=2)
  task = make(USE_REPEATED_LAYER=True, HIDDEN_DIMS=48, **keeps)
  params, batch = params_of(task), batch_of()
  jaxpr = jax.make_jaxpr(task.grads)(params, batch, None)
  kept = [v.aval.shape for scan in scans(jaxpr.jaxpr) for v in scan.outvars]
  assert kept.count((2, 4, 16, 48)) == 2
  # The inputs and the outputs of both norms.
  assert kept.count((2, 4, 16, 32)) == 4


def scans(jaxpr):
  """Yields the equations of all scans, including inner ones."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'scan':
      yield equation
    for value in equation.params.values():
      for inner in value if isinstance(value, tuple | list) else [value]:
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          yield from scans(inner)


def test_packing_changes_no_token():
  """Two documents in one row have the same logits as each in its own row."""
  task = make(USE_ROTARY_POSITION_EMB=False)
  params, batch = params_of(task), batch_of(packed=True)
  apply = jax.jit(lambda ids, *packing: task.model.apply({'params': params}, ids, *packing))
  packed = apply(batch['ids'], batch['segment_pos'], batch['segment_ids'])
  np.testing.assert_allclose(packed[:, :5], apply(batch['ids'][:, :5]), atol=1e-5)
  np.testing.assert_allclose(packed[:, 5:13], apply(batch['ids'][:, 5:13]), atol=1e-5)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('separate', [False, True])
def test_bfloat16_gradients_add_up_in_float32(separate):
  """The gradient of a frequent token equals that of float32, within bfloat16's precision."""
  task = {t: make(FPROP_DTYPE=t, SEPARATE_EMBEDDING=separate) for t in ('float32', 'bfloat16')}
  params, batch = params_of(task['float32']), batch_of(batch_size=256)
  often = np.random.default_rng(1).random(batch['ids'].shape) < 0.5
  batch = {**batch, 'ids': jnp.where(often, 7, batch['ids'])}
  exact, rough = (grads_of(t, params, batch)[1] for t in task.values())
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(rough), strict=True
  ):
    error = np.linalg.norm(y - x) / np.linalg.norm(x)
    assert error < 0.05, (path, error)
  row = lambda grads: grads['embedding']['emb_var'][7]
  assert np.linalg.norm(row(rough) - row(exact)) / np.linalg.norm(row(exact)) < 0.02


VARIANTS = {
  'rotary': dict(USE_ROTARY_POSITION_EMB=True),
  'rotary half': dict(USE_ROTARY_POSITION_EMB=True, ROPE_LAYOUT='half'),
  'sinusoidal': dict(TRAINABLE_POSITION_EMB=False),
  'rms, gated, no bias': dict(
    NORM_CLS='RmsNorm', USE_GATED_ACTIVATION=True, ACTIVATION_CLS='silu', USE_BIAS=False
  ),
  'separate': dict(SEPARATE_EMBEDDING=True),
  'caps': dict(SOFTMAX_CAP_LOGITS=30.0, ATTEN_LOGIT_CAP=50.0),
  'grouped': dict(NUM_KV_HEADS=2),
  'wide heads': dict(DIMS_PER_HEAD=16, HEADS_SPAN_MODEL=False),
  'bfloat16': dict(FPROP_DTYPE='bfloat16'),
}


# The gradients of the others are compared with praxis' and transformers' in tests/parity.


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('repeated', [False, True])
@pytest.mark.parametrize('name', VARIANTS)
def test_variants_have_finite_gradients_for_every_parameter(name, repeated):
  task = make(**VARIANTS[name], USE_REPEATED_LAYER=repeated)
  loss, grads = grads_of(task, params_of(task), batch_of(packed=True))
  assert np.isfinite(loss)
  for path, g in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(g).all(), path
    assert np.abs(g).max() > 0, path
    assert g.dtype == jnp.float32


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('name', ['rotary', 'rotary half', 'caps', 'grouped', 'bfloat16'])
def test_causality(name):
  """No logit depends on a later token."""
  task = make(**VARIANTS[name])
  params, ids = params_of(task), batch_of()['ids']
  changed = ids.at[:, 9:].set((ids[:, 9:] + 1) % 61)
  apply = jax.jit(task.model.apply)
  a, b = (apply({'params': params}, x) for x in (ids, changed))
  np.testing.assert_array_equal(a[:, :9], b[:, :9])
  assert np.abs(a[:, 9:] - b[:, 9:]).max() > 1e-3


@pytest.mark.slow
def test_grouped_heads_equal_repeated_keys():
  """GQA equals full attention if each key/value head is copied to its group."""
  grouped, full = make(NUM_KV_HEADS=2, USE_BIAS=False), make(USE_BIAS=False)
  params = params_of(grouped)
  copied = jax.tree.map(lambda x: x, params)
  for layer in copied['transformer'].values():
    qkv = layer['self_attention']['qkv']
    each = [qkv['query']['w'], *(jnp.repeat(qkv[k]['w'], 2, axis=1) for k in ('key', 'value'))]
    layer['self_attention']['qkv'] = {'combined': {'w': jnp.stack(each)}}
  ids = batch_of()['ids']
  logits = lambda task, params: jax.jit(task.model.apply)({'params': params}, ids)
  a, b = logits(grouped, params), logits(full, copied)
  np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('repeated', [False, True])
def test_dropout_is_on_with_an_rng_alone_and_a_function_of_it(repeated):
  task = make(DROPOUT_PROB=0.3, EMBEDDING_DROPOUT_PROB=0.3, USE_REPEATED_LAYER=repeated)
  params, batch = params_of(task), batch_of()
  loss = jax.jit(lambda key: task.loss_and_metrics(params, batch, key)[0])
  losses = [float(loss(k)) for k in (None, None, *map(jax.random.key, (1, 1, 2)))]
  assert losses[0] == losses[1]
  assert losses[2] == losses[3]
  assert len({losses[0], losses[2], losses[4]}) == 3
  without = make(USE_REPEATED_LAYER=repeated)
  assert losses[0] == float(jax.jit(lambda: without.loss_and_metrics(params, batch)[0])())


def test_logit_cap_bounds_logits():
  task = make(SOFTMAX_CAP_LOGITS=2.0)
  params = jax.tree.map(lambda x: 10 * x, params_of(task))
  logits = jax.jit(task.model.apply)({'params': params}, batch_of()['ids'])
  assert 1.9 < np.abs(logits).max() <= 2.0


def test_accuracy_counts_the_largest_logit():
  task = make()
  params, batch = params_of(task), batch_of()
  logits = np.asarray(jax.jit(task.model.apply)({'params': params}, batch['ids']))
  weights = np.asarray(batch['weights'])
  labels = np.asarray(batch['labels'])
  expected = ((logits.argmax(-1) == labels) * weights).sum() / weights.sum()
  metrics = jax.jit(lambda p: task.loss_and_metrics(p, batch)[1])(params)
  accuracy = metrics['fraction_of_correct_next_step_preds'].value
  assert float(accuracy) == pytest.approx(float(expected), abs=1e-6)


def test_modules_work_without_fiddle():
  from paxlite.layers.transformer import TransformerBlock

  fields = {f.name for f in dataclasses.fields(TransformerBlock)}
  assert {'attention_tpl', 'ffn_tpl', 'norm_tpl'} <= fields
  assert TransformerBlock().ffn_tpl.func.__name__ == 'FeedForward'


def test_an_edited_child_leaves_its_siblings_and_other_configs_alone():
  one, two = GPT126M(**SMALL).build_task(), GPT126M(**SMALL).build_task()
  one.model.transformer_tpl.layer_tpl.norm_tpl.epsilon = 0.5
  assert one.model.norm_tpl.epsilon == 1e-5
  assert two.model.transformer_tpl.layer_tpl.norm_tpl.epsilon == 1e-5


def on_whole_rows(q, k, v, visible, bias, softmax):
  mask = visible.mask(q.shape[1], k.shape[1])
  return cpu_attention.attend(q, k, v, mask, bias, softmax)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
  ('block_size', 'T'), [(8, 32), pytest.param(0, 512, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  'case',
  ['plain', pytest.param('grouped', marks=pytest.mark.slow), 'window', 'bias and attention sink'],
)
def test_attention_by_blocks_is_attention(case, block_size, T):
  """Compares output and gradients under packing; keys after a block's last query are skipped."""
  kv_heads = 2 if case == 'grouped' else 4
  values = dict(query_scale=0.5, window=6 if case == 'window' else 0)
  if 'bias' in case:
    values |= dict(sink_logit=0.0, relative_bias_tpl=lambda name: RelativeBias(4, name=name))
  whole = DotProductAttention(**values, kernel_tpl=lambda: on_whole_rows)
  blocks = DotProductAttention(**values, kernel_tpl=lambda: AttentionKernel(block_size))
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (2, T, 4, 8), (2, T, kv_heads, 8), (2, T, kv_heads, 8)
  qkv = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
  segments = jnp.where(jnp.arange(T) < T // 3, 1, 2) * jnp.ones((2, 1), jnp.int32)
  variables = jax.jit(whole.init)(jax.random.key(1), *qkv, segments)

  def value(module, variables, qkv):
    y = module.apply(variables, *qkv, segments)
    return jnp.sin(y).sum(), y

  grad = jax.jit(jax.value_and_grad(value, (1, 2), has_aux=True), static_argnums=0)
  (_, y), grads = grad(whole, variables, qkv)
  (_, y2), grads2 = grad(blocks, variables, qkv)
  np.testing.assert_allclose(y, y2, atol=1e-6)
  close = functools.partial(np.testing.assert_allclose, rtol=4e-9 * T, atol=2e-6)
  jax.tree.map(close, grads, grads2)
  dots = lambda m: [
    v.aval.shape
    for e in jax.make_jaxpr(lambda *a: m.apply(variables, *a, segments))(*qkv).jaxpr.eqns
    for v in e.outvars
    if v.aval.size >= 2 * 4 * T * T
  ]
  assert dots(whole)
  assert not dots(blocks)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('on_cpu', [True, False])
@pytest.mark.parametrize('sink_logit', [None, 0.7])
def test_attention_is_what_is_written(sink_logit, on_cpu, monkeypatch):
  """Compares with the formula in float64, with a bias and grouped heads, on CPU and elsewhere."""
  if not on_cpu:
    monkeypatch.setattr(cpu_attention.CpuKernel, 'refusal', lambda *_: 'is left out')
  module = DotProductAttention(
    query_scale=0.5,
    sink_logit=sink_logit,
    relative_bias_tpl=lambda name: RelativeBias(4, name=name),
  )
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)
  q, k, v = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
  variables = meta.unbox(module.init(jax.random.key(1), q, k, v))
  wrb = np.array(variables['params']['relative_bias']['wrb'], np.float64)
  distance = np.arange(9)[:, None] - np.arange(9)
  k2, v2 = (np.repeat(np.array(x, np.float64), 2, axis=2) for x in (k, v))
  scores = 0.5 * np.einsum('BTNH,BSNH->BNTS', np.array(q, np.float64), k2)
  scores = np.exp(scores + wrb[:, np.maximum(distance, 0)]) * (distance >= 0)
  total = scores.sum(-1) + (0 if sink_logit is None else np.exp(sink_logit))
  expected = np.einsum('BNTS,BSNH->BTNH', scores / total[..., None], v2)
  np.testing.assert_allclose(module.apply(variables, q, k, v), expected, atol=1e-5)


@pytest.mark.parametrize('on_cpu', [True, False])
def test_attention_multiplies_in_the_dtype_of_its_arguments(on_cpu, monkeypatch):
  """This includes the backward pass; on an accelerator, float32 products are far slower."""
  if not on_cpu:
    monkeypatch.setattr(cpu_attention.CpuKernel, 'refusal', lambda *_: 'is left out')
  qkv = [jnp.ones((1, 8, 2, 4), jnp.bfloat16)] * 3
  y, pull = jax.vjp(lambda *qkv: DotProductAttention(query_scale=0.5).apply({}, *qkv), *qkv)
  dots = [e for e in jax.make_jaxpr(pull)(y).jaxpr.eqns if e.primitive.name == 'dot_general']
  assert len(dots) == 4
  assert {v.aval.dtype for e in dots for v in e.invars} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
  ('equation', 'x', 'w', 'first'),
  [
    ('BTD,DF->BTF', (2, 8, 16), (16, 64), 'x'),
    ('BTF,FD->BTD', (2, 8, 64), (64, 16), 'y'),
    ('BTD,ADNH->BTANH', (2, 8, 16), (3, 16, 4, 4), 'x'),
    ('BTNH,DNH->BTD', (2, 8, 4, 4), (16, 4, 4), 'y'),
    ('BTD,VD->BTV', (2, 8, 16), (256, 16), 'x'),
    ('JECD,EDF->JECF', (2, 3, 8, 16), (3, 16, 64), 'x'),
  ],
)
def test_gradients_of_a_product_with_a_weight(equation, x, w, first):
  """They equal those of jnp.einsum; for the weight's gradient the smaller factor is transposed."""
  x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((x, w)))
  value = lambda product: lambda x, w: jnp.sin(product(equation, x, w)).sum()
  want = jax.grad(value(jnp.einsum), (0, 1))(x, w)
  got = jax.grad(value(weight_matmul), (0, 1))(x, w)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
  y, pull = jax.vjp(lambda w: weight_matmul(equation, x, w), w)
  dots = [e for e in jax.make_jaxpr(pull)(y).jaxpr.eqns if e.primitive.name == 'dot_general']
  shapes = [[v.aval.shape for v in e.invars] for e in dots]
  assert ([x.shape, y.shape] if first == 'x' else [y.shape, x.shape]) in shapes


def test_a_gradient_that_a_pipeline_adds_up_is_not_rounded():
  """bfloat16 has a relative error of up to 4e-3."""
  x, w, grad = (
    jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
    for i, s in enumerate([(2, 8, 16), (16, 64), (2, 8, 64)])
  )
  y, pull = jax.vjp(lambda x, w: summed_product('BTD,DF->BTF', x, w), x, w)
  x_grad, w_grad = pull(grad)
  want = np.einsum('BTD,BTF->DF', *(np.asarray(a, np.float64) for a in (x, grad)))
  assert (y.dtype, x_grad.dtype, w_grad.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(w_grad, want, rtol=1e-5, atol=1e-5)
