"""Experts: the numbers of praxis, capacity and drops, and the dropless variant."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.layers.moe import moe
from paxlite.layers.moe.dropless import DroplessDispatch
from paxlite.layers.moe.group_router import LOAD_BIAS, GroupRouter, balanced
from paxlite.layers.norms import RmsNorm
from paxlite.layers.sown import SOWN, SUMMARIES, over_layers
from paxlite.losses.metrics import Mean, Weighted
from paxlite.training.step import train_step
from tests.support import praxis
from tests.support.meshes import compiled

SMALL = dict(
  NUM_LAYERS=4, MODEL_DIMS=32, NUM_HEADS=4, HIDDEN_DIMS=64, VOCAB_SIZE=64, MAX_SEQ_LEN=16,
  NUM_EXPERTS=8, NUM_MOE_GROUPS=2, FPROP_DTYPE='float32', ICI_MESH_SHAPE=[1, 1, 1],
  DCN_MESH_SHAPE=[1, 1, 1],
)  # fmt: skip


def flat(tree):
  return traverse_util.flatten_dict(tree, sep='/')


@pytest.fixture(autouse=True)
def highest_precision():
  with jax.default_matmul_precision('highest'):
    yield


OURS = moe.load_balance_loss


def balance_of_praxis(routing):
  """Returns praxis' balancing loss, in whose inner means padding counts.

  So that of a group with the share f of real tokens is f² times ours.
  """
  groups = [jax.tree.map(lambda x, j=j: x[j : j + 1], routing) for j in range(len(routing[0]))]
  return jnp.stack([g.is_token_JM.mean() ** 2 * OURS(g) for g in groups]).mean()


def test_gating_is_praxis():
  reference = praxis.load('gating_cf2')
  routing = moe.route(jnp.asarray(reference['logits']), reference['paddings'] == 0, top_k=2)
  C = moe.capacity(group_size=12, num_experts=4, factor=2.0)
  slots = moe.assign_slots(routing, C)
  expert = jax.nn.one_hot(routing.experts_JMX, 4)[..., None]
  slot = jax.nn.one_hot(slots.slots_JMX, C)[..., None, :]
  at_JMXEC = expert * slot * slots.has_slot_JMX[..., None, None]
  np.testing.assert_array_equal(at_JMXEC.sum(2), reference['dispatch'])
  combine = (at_JMXEC * routing.weights_JMX[..., None, None]).sum(2)
  np.testing.assert_allclose(combine, reference['combine'], atol=1e-6)
  np.testing.assert_allclose(balance_of_praxis(routing), reference['aux'], atol=1e-6)


def test_layer_is_praxis(monkeypatch):
  """Compares output, auxiliary loss and summaries; praxis' layer includes norm and residual."""
  monkeypatch.setattr(moe, 'load_balance_loss', balance_of_praxis)
  reference = praxis.load('moe_top2')
  layer = moe.MoeFeedForward(16, 32, num_experts=4, num_groups=2)
  params = {
    'router': {'gate': reference['params/gate']},
    'w_in': reference['params/wi_0'],
    'w_out': reference['params/wo_0'],
  }
  x, paddings = reference['in/x'], reference['in/paddings']
  normed = RmsNorm().apply({'params': {'scale': reference['params/layer_norm/scale']}}, x)
  apply = jax.jit(lambda *given: layer.apply({'params': params}, *given, mutable=SOWN))
  y, sown = apply(normed, paddings)
  np.testing.assert_allclose(x + y, reference['out/y'], atol=2e-6)
  aux = reference['aux/aux_moe_load_balance_loss/value']
  np.testing.assert_allclose(sown['losses']['load_balance'][0], aux, atol=1e-7)
  shares = [f'dispatch_{k}' for k in range(3)] + [f'over_capacity_{k}_ratio' for k in (1, 2)]
  for name in shares:
    (found,) = sown['summaries'][name]
    np.testing.assert_allclose(found, reference[f'summ/{name}_scalar'], atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('repeated', [False, True], ids=['unrolled', 'repeated'])
def test_glam_is_praxis(repeated, monkeypatch):
  """Compares logits of real tokens, losses and all gradients; praxis' logits of padding differ."""
  monkeypatch.setattr(moe, 'load_balance_loss', balance_of_praxis)
  reference = praxis.load('glam4l')
  task = fdl.build(GLaM126M64E(**SMALL, USE_REPEATED_LAYER=repeated).build_task())
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
      share = real.mean() if name == 'aux_loss' else 1  # praxis' batches all have the weight 1
      np.testing.assert_allclose(metric.weight, share * reference[f'metric_weight/{name}'])
  assert {'aux_loss', 'dispatch_2', 'over_capacity_1_ratio', 'max_expert_load'} <= set(metrics)
  expected = flat(stack(read('grads')))
  assert flat(grads).keys() == expected.keys()
  for path, grad in flat(grads).items():
    np.testing.assert_allclose(grad, expected[path], atol=2e-5, rtol=1e-4, err_msg=path)


@pytest.mark.slow
def test_initial_values_are_praxis():
  task = fdl.build(GLaM126M64E(**SMALL).build_task())
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


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('top_k', [1, 3, 2])
def test_dropless_equals_experts_with_slots_for_all(top_k):
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


@pytest.mark.slow
def test_a_token_without_a_slot_gets_nothing():
  (layer, _), params, x, _ = layers(capacity_factor=0.1)  # 4 slots for 16 tokens × 2 / 4 experts
  params['router']['gate'] = jnp.zeros((16, 4)).at[:, 0].set(0)
  y, sown = jax.jit(lambda p: layer.apply({'params': p}, x, mutable=SOWN))(params)
  summaries = {k: float(v[0]) for k, v in sown['summaries'].items()}
  # Without a preference, all tokens choose experts 0 and 1. The first 4 of a group get a slot.
  assert summaries['dispatch_0'] == 0.75
  assert summaries['dispatch_2'] == 0.25
  assert summaries['over_capacity_1_ratio'] == 0.75
  assert summaries['max_expert_load'] == 2
  groups = np.asarray(y).reshape(2, 16, 16)
  assert np.abs(groups[:, :4]).min(-1).all()
  assert not groups[:, 4:].any()


@pytest.mark.slow
def test_rows_that_fill_a_batch_up_do_not_count():
  """In the last batch of an evaluation, rows without a target change no metric."""
  reference = praxis.load('glam4l')
  task = fdl.build(GLaM126M64E(**SMALL | dict(USE_DROPLESS_MOE=True)).build_task())
  params = praxis.glam_tree(reference, 'params', num_heads=4)
  batch = praxis.batch(reference)
  filled = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in batch.items()}
  loss = jax.jit(task.loss_and_metrics)
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
    (
      dict(DROPLESS_BUFFER_FACTOR=-1.0),
      'DROPLESS_BUFFER_FACTOR=-1 must not be negative; 0 turns it off',
    ),
  ],
)
def test_what_cannot_be(changes, message):
  with pytest.raises(UserError, match=message):
    GLaM126M64E(**SMALL | changes).validate()


@pytest.mark.parametrize(
  ('changes', 'split'),
  [
    ({}, ('data', None)), (dict(NUM_EXPERTS=6), (None, 'data')),
    (dict(EXPERT_AXIS='data'), ('data', None)),
    (dict(MESH_AXES=['replica', 'data', 'mdl', 'expert'], ICI_MESH_SHAPE=[1, 4, 1, 2]),
     ('expert', 'data')),
    (dict(MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 4, 1]),
     (None, 'data')),
  ],
)  # fmt: skip
def test_fsdp_splits_dropless_experts_or_their_width(changes, split):
  """Tokens leave their device only where EXPERT_AXIS says so."""
  mesh = dict(USE_DROPLESS_MOE=True, ICI_MESH_SHAPE=[1, 4, 1])
  e = GLaM126M64E(**SMALL | mesh | changes)
  assert (e.rules['experts'], e.rules['expert_embed']) == split
  leaves = e.rules['experts'] not in (None, *e.rules['expert_groups'])
  assert leaves == (e.EXPERT_AXIS is not None)


# Each row is its own group, and few tokens have a slot, so microbatches route as the batch does.
BY_ROW = SMALL | dict(NUM_MOE_GROUPS=4, EXPERT_CAPACITY_FACTOR=0.5, PERCORE_BATCH_SIZE=4)


def metrics_of(batch, **changes):
  experiment = GLaM126M64E(**BY_ROW | changes)
  task = fdl.build(experiment.build_task())
  params = meta.unbox(jax.jit(task.init_params)(jax.random.key(0)))
  _, _, metrics = jax.jit(lambda p: task.grads(p, batch, None))(params)
  return {k: float(m.value) for k, m in metrics.items()}


def rows(lengths):
  """Returns packed rows [b, 16] with different ids, filled with padding."""
  at = np.arange(16)[None]
  segment_ids = (at < np.array(lengths)[:, None]).astype(np.int32)
  ids = np.random.default_rng(0).integers(1, 64, segment_ids.shape).astype(np.int32) * segment_ids
  return dict(
    ids=ids, labels=ids, weights=segment_ids.astype(np.float32), segment_ids=segment_ids,
    segment_pos=at * segment_ids,
  )  # fmt: skip


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_summaries_of_a_pipeline_are_those_of_microbatches():
  batch = rows([16, 2, 9, 5])
  stages = dict(
    USE_REPEATED_LAYER=True, NUM_MICROBATCHES=4, MESH_AXES=['stage', 'replica', 'data', 'mdl'],
    DCN_MESH_SHAPE=[1, 1, 1, 1], PERCORE_BATCH_SIZE=2,
  )  # fmt: skip
  pipeline = metrics_of(batch, **stages, ICI_MESH_SHAPE=[2, 1, 1, 1])
  split = metrics_of(batch, NUM_MICROBATCHES=4, USE_REPEATED_LAYER=True)
  found = {n: split[n] for n in split if n.startswith(('dispatch', 'over_capacity', 'max_'))}
  assert len(found) >= 3
  for name, value in found.items():
    assert pipeline[name] == pytest.approx(value, abs=1e-6), name


BALANCED = SMALL | dict(
  NUM_LAYERS=2, MODEL_DIMS=16, HIDDEN_DIMS=16, NUM_HEADS=2, MAX_SEQ_LEN=8, BLOCKS_PER_LAYER=1,
  ROUTER='balanced', NUM_EXPERT_GROUPS=4, NUM_EXPERT_GROUPS_PER_TOKEN=2, USE_DROPLESS_MOE=True,
  USE_REPEATED_LAYER=True, ROUTER_BIAS_RATE=0.25,
)  # fmt: skip
STAGES = dict(
  MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1],
  DCN_MESH_SHAPE=[1, 1, 1, 1], NUM_MICROBATCHES=4,
)  # fmt: skip


def balanced_task(**changes):
  """Returns a Task, parameters that route, and a batch with padding."""
  task = fdl.build(MixtureOfExperts(**BALANCED | changes).build_task())
  ids = jax.random.randint(jax.random.key(1), (4, 9), 0, 61)
  segments = jnp.ones((4, 8), jnp.int32).at[::2, 5:].set(0)
  batch = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': segments * 1.0}
  batch |= {'segment_ids': segments, 'segment_pos': jnp.broadcast_to(jnp.arange(8), (4, 8))}
  return task, batch


def initial(task):
  return compiled(jax.jit(lambda rng: meta.unbox(task.init(rng))), jax.random.key(0))(
    jax.random.key(0)
  )


def by_layer(loads):
  """Returns loads or biases of both layers, [2, E]."""
  found = [np.asarray(x) for x in jax.tree.leaves(loads)]
  return found[0] if len(found) == 1 else np.stack(found)


@functools.cache
def loads_of(**changes):
  task, batch = balanced_task(**changes)
  params = initial(balanced_task(**changes | dict(USE_REPEATED_LAYER=True))[0]).params
  if not changes.get('USE_REPEATED_LAYER', True):
    layers = params['transformer'].pop('repeat')
    for i in range(2):
      params['transformer'][f'x_layers_{i}'] = jax.tree.map(lambda w, i=i: w[i], layers)
  grads = jax.jit(lambda *arguments: task.grads(*arguments, None)[1][1])
  return by_layer(compiled(grads, params, batch)(params, batch))


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [
    dict(NUM_MICROBATCHES=2),
    STAGES,
    dict(NUM_MICROBATCHES=4, GRADIENT_DTYPE='bfloat16'),
    STAGES | dict(NUM_LAYERS=4, NUM_PIPELINE_REPEATS=2),
    STAGES | dict(NUM_MICROBATCHES=1),
    STAGES | dict(CHECKPOINT_POLICY='SAVE_EVERYTHING'),
    dict(USE_REPEATED_LAYER=False),
    dict(USE_DROPLESS_MOE=False, EXPERT_CAPACITY_FACTOR=9.0),
  ],
  ids=str,
)
def test_loads_are_those_of_the_whole_batch(changes):
  """However a step is computed. Neither padding nor an idle stage has a load."""
  like = {'NUM_LAYERS': changes['NUM_LAYERS']} if 'NUM_LAYERS' in changes else {}
  loads = loads_of(**like)
  assert (loads.sum(-1) == 2 * (2 * 8 + 2 * 5)).all()
  stages = {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()}
  np.testing.assert_array_equal(loads_of(**stages), loads)


@pytest.mark.slow
def test_the_bias_follows_the_number_of_tokens_that_chose_an_expert():
  """The counts are those of the routing, without padding."""
  router = GroupRouter(num_experts=6, top_k=2, num_groups=3, top_groups=2)
  x_JMD = jax.random.normal(jax.random.key(0), (2, 7, 8))
  is_token_JM = jnp.ones((2, 7), bool).at[1, 3:].set(False)
  params = meta.unbox(jax.jit(router.init)(jax.random.key(1), x_JMD, is_token_JM))['params']

  def output(params):
    routing = router.apply({'params': params}, x_JMD, is_token_JM)
    return routing.weights_JMX.sum(), routing.experts_JMX

  grads, experts_JMX = jax.jit(jax.grad(output, has_aux=True))(params)
  load = np.bincount(np.asarray(experts_JMX)[np.asarray(is_token_JM)].ravel(), minlength=6)
  assert load.sum() == 2 * (7 + 3)
  np.testing.assert_array_equal(grads[LOAD_BIAS], load)
  expected = 0.5 + 0.01 * np.sign(load.mean() - load).astype(np.float32)
  np.testing.assert_array_equal(balanced(jnp.full(6, 0.5), grads[LOAD_BIAS], 0.01), expected)


@pytest.mark.slow
def test_a_step_moves_the_bias_once_by_the_load_of_all_microbatches():
  """The optimizer has no state for it, and a step that is skipped leaves it."""
  task, batch = balanced_task(NUM_MICROBATCHES=4)
  before = initial(task)
  step = compiled(jax.jit(functools.partial(train_step, task, 0)), before, batch)
  bias = lambda state: by_layer(task.optimizer.split_ruled(state.params)[0])
  load = loads_of()
  after, _ = step(before, batch)
  expected = 0.25 * np.sign(load.mean(-1, keepdims=True) - load)
  np.testing.assert_array_equal(bias(after), expected)
  assert len(np.unique(expected)) > 1
  skipped, _ = step(after, batch | {'weights': batch['weights'] * jnp.nan})
  assert int(skipped.skipped) == 1
  np.testing.assert_array_equal(bias(skipped), expected)
  names = {jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(after.opt_state)}
  assert not [name for name in names if LOAD_BIAS in name]


def test_a_bias_that_is_not_among_the_trainable_variables_stays():
  task, _ = balanced_task(USE_LORA=True)
  names = jax.eval_shape(task.init_params, jax.random.key(0))
  assert not jax.tree.leaves(task.optimizer.split_ruled(names)[0])
