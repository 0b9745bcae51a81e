"""Experts: the numbers of praxis, capacity and drops, and the dropless variant."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.core.variable_names import REPLACED
from paxlite.experiments.glam import GLaM126M64E
from paxlite.layers import moe
from paxlite.layers.dropless import DroplessDispatch
from paxlite.layers.norms import RmsNorm
from paxlite.layers.sown import SOWN, SUMMARIES, over_layers
from paxlite.training.metrics import Mean, Weighted
from paxlite.training.step import train_step
from tests.support import praxis

SMALL = dict(
  NUM_LAYERS=4,
  MODEL_DIMS=32,
  NUM_HEADS=4,
  HIDDEN_DIMS=64,
  VOCAB_SIZE=64,
  MAX_SEQ_LEN=16,
  NUM_EXPERTS=8,
  NUM_MOE_GROUPS=2,
  FPROP_DTYPE='float32',
  ICI_MESH_SHAPE=[1, 1, 1],
  DCN_MESH_SHAPE=[1, 1, 1],
)


def flat(tree):
  return traverse_util.flatten_dict(tree, sep='/')


@pytest.fixture(autouse=True)
def highest_precision():
  with jax.default_matmul_precision('highest'):
    yield


def test_gating_is_praxis():
  reference = praxis.load('gating_cf2')
  routing = moe.route(jnp.asarray(reference['logits']), reference['paddings'] == 0, top_k=2)
  C = moe.capacity(group_size=12, num_experts=4, factor=2.0)
  places = moe.assign_places(routing, C)
  expert = jax.nn.one_hot(routing.experts_JMX, 4)[..., None]
  place = jax.nn.one_hot(places.places_JMX, C)[..., None, :]
  at_JMXEC = expert * place * places.has_place_JMX[..., None, None]
  np.testing.assert_array_equal(at_JMXEC.sum(2), reference['dispatch'])
  combine = (at_JMXEC * routing.weights_JMX[..., None, None]).sum(2)
  np.testing.assert_allclose(combine, reference['combine'], atol=1e-6)
  np.testing.assert_allclose(moe.load_balance_loss(routing), reference['aux'], atol=1e-6)


def test_layer_is_praxis():
  """Compares output, auxiliary loss and summaries; praxis' layer includes norm and residual."""
  reference = praxis.load('moe_top2')
  layer = moe.MoeFeedForward(16, 32, num_experts=4, num_groups=2)
  params = {
    'router': {'gate': reference['params/gate']},
    'w_in': reference['params/wi_0'],
    'w_out': reference['params/wo_0'],
  }
  x, paddings = reference['in/x'], reference['in/paddings']
  normed = RmsNorm().apply({'params': {'scale': reference['params/layer_norm/scale']}}, x)
  y, sown = layer.apply({'params': params}, normed, paddings, mutable=SOWN)
  np.testing.assert_allclose(x + y, reference['out/y'], atol=2e-6)
  aux = reference['aux/aux_moe_load_balance_loss/value']
  np.testing.assert_allclose(sown['losses']['load_balance'][0], aux, atol=1e-7)
  shares = [f'dispatch_{k}' for k in range(3)] + [f'over_capacity_{k}_ratio' for k in (1, 2)]
  for name in shares:
    (found,) = sown['summaries'][name]
    np.testing.assert_allclose(found, reference[f'summ/{name}_scalar'], atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
  'repeated',
  [pytest.param(False, marks=pytest.mark.slow, id='unrolled'), pytest.param(True, id='repeated')],
)
def test_glam_is_praxis(repeated):
  """Compares logits of real tokens, losses and all gradients; praxis' logits of padding differ."""
  reference = praxis.load('glam4l')
  task = fdl.build(GLaM126M64E(**SMALL, USE_REPEATED_LAYER=repeated).task())
  batch = praxis.batch(reference)
  read = lambda kind: praxis.glam_tree(reference, kind, num_heads=4)
  stack = lambda tree: tree
  if repeated:

    def stack(tree):
      layers = tree['transformer']
      stacked = jax.tree.map(lambda *x: np.stack(x), *(layers[k] for k in sorted(layers)))
      return tree | {'transformer': {'repeat': stacked}}

  params = stack(read('params'))
  logits = jax.jit(task.model.apply)(
    {'params': params}, batch['ids'], batch['segment_pos'], batch['segment_ids']
  )
  real = batch['segment_ids'] > 0
  np.testing.assert_allclose(logits[real], reference['logits'][real], atol=2e-5, rtol=1e-4)
  grads, _, metrics = jax.jit(lambda p: task.grads(p, batch, None))(params)
  for name, metric in metrics.items():
    if f'metric/{name}' in reference:
      np.testing.assert_allclose(metric.value, reference[f'metric/{name}'], atol=5e-6)
      np.testing.assert_allclose(metric.weight, reference[f'metric_weight/{name}'])
  assert {'aux_loss', 'dispatch_2', 'over_capacity_1_ratio', 'max_expert_load'} <= set(metrics)
  expected = flat(stack(read('grads')))
  assert flat(grads).keys() == expected.keys()
  for path, grad in flat(grads).items():
    np.testing.assert_allclose(grad, expected[path], atol=2e-5, rtol=1e-4, err_msg=path)


def test_initial_values_are_praxis():
  task = fdl.build(GLaM126M64E(**SMALL).task())
  params = flat(meta.unbox(jax.jit(task.init_params)(jax.random.key(0))))
  stats = praxis.init_stats('glam4l')
  assert len(stats) == len(params)
  for path, (shape, mean, std) in stats.items():
    value = np.asarray(params[praxis.glam_path(path)])
    assert value.size == np.prod(shape), path
    if std == 0:
      np.testing.assert_array_equal(value, mean, err_msg=path)
    else:
      error = std / np.sqrt(value.size)
      assert abs(value.mean()) < 5 * error, path
      assert abs(value.std() - std) < 5 * error, path


def layers(capacity_factor=2.0, **kwargs):
  made = [
    moe.MoeFeedForward(16, 32, num_experts=4, num_groups=2, dispatch_tpl=dispatch, **kwargs)
    for dispatch in (lambda: moe.CapacityDispatch(capacity_factor), DroplessDispatch)
  ]
  x = jax.random.normal(jax.random.key(1), (4, 8, 16))
  paddings = jnp.zeros((4, 8)).at[1, 5:].set(1)
  params = meta.unbox(jax.jit(made[0].init)(jax.random.key(0), x, paddings))['params']
  return made, params, x, paddings


@pytest.mark.parametrize('top_k', [*(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3)), 2])
def test_dropless_equals_experts_with_places_for_all(top_k):
  """Compares output and gradients, at a capacity that drops nothing."""
  router = lambda **kwargs: moe.TopKRouter(top_k=top_k, **kwargs)
  (limited, dropless), params, x, paddings = layers(capacity_factor=4.0, router_tpl=router)

  def loss(params, layer):
    y, sown = layer.apply({'params': params}, x, paddings, mutable=SOWN)
    return jnp.sin(y).sum() + sown['losses']['load_balance'][0], (y, sown['summaries'])

  grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (_, (y, load)), grads = grad(params, limited)
  (_, (y2, load2)), grads2 = grad(params, dropless)
  assert float(load[f'dispatch_{top_k}'][0]) == 1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), load, load2)
  np.testing.assert_allclose(y, y2, atol=1e-5)
  assert not np.asarray(y)[1, 5:].any()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, grads2)


def test_a_token_without_a_place_gets_nothing():
  (layer, _), params, x, _ = layers(capacity_factor=0.1)  # 4 places for 16 tokens × 2 / 4 experts
  params['router']['gate'] = jnp.zeros((16, 4)).at[:, 0].set(0)
  y, sown = layer.apply({'params': params}, x, mutable=SOWN)
  summaries = {k: float(v[0]) for k, v in sown['summaries'].items()}
  # Without a preference, all tokens choose experts 0 and 1. The first 4 of a group get a place.
  assert summaries['dispatch_0'] == 0.75
  assert summaries['dispatch_2'] == 0.25
  assert summaries['over_capacity_1_ratio'] == 0.75
  assert summaries['max_expert_load'] == 2
  groups = np.asarray(y).reshape(2, 16, 16)
  assert np.abs(groups[:, :4]).min(-1).all()
  assert not groups[:, 4:].any()


def test_rows_that_fill_a_batch_up_do_not_count():
  """In the last batch of an evaluation, rows without a target change no metric."""
  reference = praxis.load('glam4l')
  task = fdl.build(GLaM126M64E(**SMALL | dict(USE_DROPLESS_MOE=True)).task())
  params = praxis.glam_tree(reference, 'params', num_heads=4)
  batch = praxis.batch(reference)
  filled = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in batch.items()}
  loss = jax.jit(task.loss)
  metrics, more = loss(params, batch)[1], loss(params, filled)[1]
  for name in ('avg_xent', 'log_pplx', 'num_predictions'):
    np.testing.assert_allclose(metrics[name].value, more[name].value, rtol=1e-6)
    np.testing.assert_allclose(metrics[name].weight, more[name].weight)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(NUM_EXPERTS_PER_TOKEN=9), 'NUM_EXPERTS_PER_TOKEN=9 is more than NUM_EXPERTS=8'),
    (dict(EXPERT_CAPACITY_FACTOR=0.0), 'USE_DROPLESS_MOE=True'),
    (dict(EXPERT_AXIS='expert'), 'EXPERT_AXIS=expert must be None, data, or expert where'),
    (dict(EXPERT_AXIS='data', ICI_MESH_SHAPE=[1, 3, 1]), 'mesh axis data = 3'),
    (dict(ICI_MESH_SHAPE=[1, 1, 1, 8]), 'ICI_MESH_SHAPE=.* 3 positive sizes'),
    (dict(DROPLESS_ROOM=-1.0), 'DROPLESS_ROOM=-1 must not be negative; 0 turns it off'),
  ],
)
def test_what_cannot_be(changes, message):
  with pytest.raises(UserError, match=message):
    GLaM126M64E(**SMALL | changes).validate()


# Each row is its own group, and few tokens have a place, so microbatches route as the batch does.
BY_ROW = SMALL | dict(NUM_MOE_GROUPS=4, EXPERT_CAPACITY_FACTOR=0.5, PERCORE_BATCH_SIZE=4)


def metrics_of(batch, **changes):
  experiment = GLaM126M64E(**BY_ROW | changes)
  task = fdl.build(experiment.task())
  params = meta.unbox(task.init_params(jax.random.key(0)))
  _, _, metrics = jax.jit(lambda p: task.grads(p, batch, None))(params)
  return {k: float(m.value) for k, m in metrics.items()}


def rows(lengths):
  """Returns packed rows [b, 16] with different ids, filled with padding."""
  at = np.arange(16)[None]
  segment_ids = (at < np.array(lengths)[:, None]).astype(np.int32)
  ids = np.random.default_rng(0).integers(1, 64, segment_ids.shape).astype(np.int32) * segment_ids
  return dict(
    ids=ids,
    labels=ids,
    weights=segment_ids.astype(np.float32),
    segment_ids=segment_ids,
    segment_pos=at * segment_ids,
  )


@pytest.mark.slow
def test_summaries_over_microbatches_are_those_of_the_batch():
  """Shares of tokens weight microbatches by their tokens, because some have fewer."""
  batch = rows([16, 2, 9, 5])
  whole, split = metrics_of(batch), metrics_of(batch, NUM_MICROBATCHES=4)
  names = [k for k in whole if k.startswith(('dispatch', 'over_capacity'))]
  assert len(names) == 5
  assert whole['over_capacity_2_ratio'] > 0.1
  for name in names:
    assert split[name] == pytest.approx(whole[name], abs=1e-6), name


@pytest.mark.slow
def test_the_busiest_expert_of_microbatches_is_that_of_the_busiest():
  batch = rows([16, 2, 9, 5])
  each = [metrics_of({k: v[i : i + 1] for k, v in batch.items()}) for i in range(4)]
  loads = [m['max_expert_load'] for m in each]
  assert max(loads) > 1.1 * np.mean(loads)
  split = metrics_of(batch, NUM_MICROBATCHES=4)['max_expert_load']
  assert split == pytest.approx(max(loads))
  same = {k: np.repeat(v[:1], 4, 0) for k, v in batch.items()}
  whole, split = metrics_of(same), metrics_of(same, NUM_MICROBATCHES=4)
  assert split['max_expert_load'] == pytest.approx(whole['max_expert_load'])


def test_the_busiest_expert_of_layers_and_evaluation_batches_is_that_of_the_busiest():
  sown = {SUMMARIES: {'a': {'max_x': (1.0,), 'y': (1.0,)}, 'b': {'max_x': (5.0,), 'y': (3.0,)}}}
  found = over_layers(jax.tree.map(jnp.asarray, sown))
  assert {k: float(v) for k, v in found.items()} == {'max_x': 5, 'y': 2}
  mean = Mean()
  for value, weight in ((1.0, 3.0), (5.0, 1.0)):
    mean.add({name: Weighted(value, weight) for name in ('max_x', 'y')})
  assert mean.result() == {'max_x': 5, 'y': 2}


@pytest.mark.slow
def test_summaries_of_a_pipeline_are_those_of_microbatches():
  batch = rows([16, 2, 9, 5])
  stages = dict(
    USE_REPEATED_LAYER=True,
    NUM_MICROBATCHES=4,
    MESH_AXES=['stage', 'replica', 'data', 'mdl'],
    DCN_MESH_SHAPE=[1, 1, 1, 1],
    PERCORE_BATCH_SIZE=2,
  )
  pipeline = metrics_of(batch, **stages, ICI_MESH_SHAPE=[2, 1, 1, 1])
  split = metrics_of(batch, NUM_MICROBATCHES=4, USE_REPEATED_LAYER=True)
  found = {n: split[n] for n in split if n.startswith(('dispatch', 'over_capacity', 'max_'))}
  assert len(found) >= 3
  for name, value in found.items():
    assert pipeline[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize('microbatches', [1, 2])
def test_the_bias_for_the_load_is_replaced_and_not_optimized(microbatches):
  """It grows for experts with less than the mean load; the optimizer has no state for it."""
  from paxlite.experiments.deepseek import DeepSeekV3

  sizes = dict(
    NUM_LAYERS=1, NUM_DENSE_BLOCKS=0, NUM_HEADS=2, MODEL_DIMS=16, HIDDEN_DIMS=24,
    VOCAB_SIZE=61, MAX_SEQ_LEN=8,
    DIMS_PER_HEAD=8, ROTARY_DIMS_PER_HEAD=4, VALUE_DIMS_PER_HEAD=8, LATENT_DIMS=8,
    QUERY_LATENT_DIMS=0, NUM_EXPERTS=8, NUM_EXPERT_GROUPS=4, NUM_EXPERT_GROUPS_PER_TOKEN=2,
    NUM_EXPERTS_PER_TOKEN=2, EXPERT_HIDDEN_DIMS=8, FPROP_DTYPE='float32', LR_COS_WARMUP=1,
    NUM_MICROBATCHES=microbatches, ROUTER_BIAS_RATE=0.25,
  )  # fmt: skip
  task = fdl.build(DeepSeekV3(**sizes).task())
  state = meta.unbox(task.init(jax.random.key(0)))
  ids = jax.random.randint(jax.random.key(1), (4, 9), 0, 61)
  batch = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': jnp.ones((4, 8))}
  after, _ = jax.jit(lambda s: train_step(task, 0, s, batch))(state)
  bias = lambda s: s.params['transformer']['repeat']['ff_layer']['experts']['router'][REPLACED]
  moved = np.asarray(bias(after) - bias(state))[0]
  assert set(np.unique(moved)) <= {0.25 * n for n in range(-microbatches, microbatches + 1)}
  assert np.any(moved)
  if microbatches == 1:
    assert moved.max() > 0 > moved.min()
  names = {jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(after.opt_state)}
  assert not [name for name in names if REPLACED in name]
  frozen = fdl.build(DeepSeekV3(**sizes, USE_LORA=True).task())
  state = meta.unbox(frozen.init(jax.random.key(0)))
  after, _ = jax.jit(lambda s: train_step(frozen, 0, s, batch))(state)
  assert np.array_equal(bias(after), bias(state))
