"""Padding counts in no balancing loss, load or summary of experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.data.base import one_segment
from paxlite.experiments.deepseek_v4.blocks import HashRouter, RootSoftplusRouter
from paxlite.experiments.gemma4.layers import ScaledRouter
from paxlite.finetuning.reinforcement.rollouts import RolloutBatches, RolloutInput
from paxlite.layers.moe import moe
from paxlite.layers.moe.dropless import DroplessDispatch
from paxlite.layers.moe.group_router import LOAD_BIAS, GroupRouter
from paxlite.layers.sown import SOWN
from paxlite.losses.sown_losses import SownLosses
from paxlite.parallel import partitioning
from tests.support.meshes import compiled

ROUTERS = {
  'top_k': moe.TopKRouter,
  'groups': functools.partial(GroupRouter, num_groups=4, top_groups=2, has_bias=False),
  'bias': functools.partial(GroupRouter, num_groups=2, top_groups=1),
  'root_softplus': RootSoftplusRouter,
  'hash': functools.partial(HashRouter, vocab_size=32),
  'scaled': ScaledRouter,
}


def found(layer, params, x_BTD, paddings_BT, ids_BT):
  """Returns the balancing loss, the summaries, and the load that moves the bias."""

  def loss(params):
    y_BTD, sown = layer.apply({'params': params}, x_BTD, paddings_BT, *ids_BT, mutable=SOWN)
    return y_BTD.sum() + sown['losses']['load_balance'][0], sown

  grads, sown = compiled(jax.jit(jax.grad(loss, has_aux=True)), params)(params)
  return sown, grads['router'].get(LOAD_BIAS, 0)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('name', ROUTERS)
def test_padding_changes_neither_loss_nor_load(name):
  rng = np.random.default_rng(sum(map(ord, name)))
  B, T, D = 3, 20, 8
  layer = moe.MoeFeedForward(
    D, 16, 8, router_tpl=ROUTERS[name], dispatch_tpl=DroplessDispatch, gated=True
  )
  x_BTD = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
  ids_BT = jnp.asarray(rng.integers(0, 32, (B, T)))
  of = lambda get: [get(ids_BT)] if name == 'hash' else []
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x_BTD, None, *of(lambda x: x))['params']
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
  params = jax.tree.map(draw, meta.unbox(shapes))
  is_token_BT = rng.uniform(size=(B, T)) < rng.uniform(0.1, 1)
  alone = lambda x: x[is_token_BT][None]
  padded = found(layer, params, x_BTD, ~is_token_BT, of(lambda x: x))
  expected = found(layer, params, alone(x_BTD), None, of(alone))
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
  jax.tree.map(close, padded, expected)


def test_groups_count_by_their_tokens():
  rng = np.random.default_rng(0)
  logits_JME = jnp.asarray(rng.normal(size=(4, 16, 8)), jnp.float32)
  is_token_JM = np.arange(16) < np.array([[16], [3], [0], [9]])
  loss = moe.load_balance_loss(moe.route(logits_JME, jnp.asarray(is_token_JM), 2))
  alone = [
    n * moe.load_balance_loss(moe.route(logits_JME[j : j + 1, :n], jnp.ones((1, n), bool), 2))
    for j, n in enumerate((16, 3, 0, 9))
    if n
  ]
  np.testing.assert_allclose(loss, sum(alone) / 28, rtol=1e-5)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(('groups', 'size'), [(1, 49), (3, 100), (2, 7), (5, 64)])
def test_without_padding_no_bit_changes(groups, size):
  logits_JME = jax.random.normal(jax.random.key(size), (groups, size, 8))
  everything = jnp.ones((groups, size), bool)

  @jax.jit
  def plain(logits_JME, is_token_JM):
    routing = moe.route(logits_JME, is_token_JM, 2)
    first_JME = jax.nn.one_hot(routing.experts_JMX[..., 0], 8) * is_token_JM[..., None]
    mean = lambda x_JME: (x_JME * is_token_JM[..., None]).mean(1)
    return (mean(routing.probabilities_JME) * mean(first_JME)).mean() * 64

  now = jax.jit(lambda x, is_token: moe.load_balance_loss(moe.route(x, is_token, 2)))
  assert plain(logits_JME, everything) == now(logits_JME, everything)
  weight = jax.jit(SownLosses().weight)
  batch = {'ids': jnp.zeros((groups, size), int), 'segment_ids': jnp.ones((groups, size), int)}
  assert weight(batch) == 1
  batch['segment_ids'] = batch['segment_ids'].at[0, 0].set(0)
  assert weight(batch) == pytest.approx(1 - 1 / groups / size)


class Answers(RolloutInput):
  """Rows with prompts, which have no weight, answers and padding."""

  batch_size, seq_len, max_token_id = 4, 24, 63

  def __init__(self, seed):
    rng = np.random.default_rng(seed)
    self.ends = rng.integers(2, 25, 4)
    at = np.arange(24)
    weights = (at >= (self.ends // 2)[:, None]) & (at < self.ends[:, None])
    self.batch = {
      'ids': rng.integers(1, 64, (4, 24)).astype(np.int32),
      'labels': rng.integers(1, 64, (4, 24)).astype(np.int32),
      'weights': weights.astype(np.float32),
    }

  def next_batch(self, params, number, rows):
    return {k: x[rows] for k, x in self.batch.items()}

  def state(self):
    return {}

  def restore(self, state):
    pass


@pytest.mark.parametrize('seed', range(3))
def test_rows_of_rollouts_end_with_their_last_target(seed):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ('replica', 'data', 'mdl'))
  data = Answers(seed)
  sharding = partitioning.batch_sharding(mesh, partitioning.DEFAULT_RULES)
  batches = RolloutBatches(data, sharding, 0)
  batch = batches.draw({})
  assert {k: (x.shape, x.dtype) for k, x in batch.items()} == {
    k: (x.shape, x.dtype) for k, x in batches.shapes().items()
  }
  expected = np.arange(24) < data.ends[:, None]
  np.testing.assert_array_equal(batch['segment_ids'], expected)
  np.testing.assert_array_equal(batch['segment_pos'], np.tile(np.arange(24), (4, 1)))
  np.testing.assert_array_equal(one_segment(np.zeros((2, 3)))['segment_ids'], 0)
