"""Experts that a table chooses by token ids."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from paxlite.core.errors import UserError
from paxlite.core.training_rules import is_never_trained
from paxlite.experiments.deepseek_v4 import DeepSeekV4
from paxlite.experiments.deepseek_v4.blocks import EXPERTS_OF_IDS, HashRouter

V, E, X, D = 11, 6, 2, 5


def test_ids_choose_and_activations_weigh():
  router = HashRouter(num_experts=E, top_k=X, vocab_size=V, scale=1.5)
  rng = np.random.default_rng(0)
  x, ids = rng.normal(size=(1, 7, D)).astype(np.float32), np.array([[3, 0, 3, 10, 5, 0, 1]])
  is_token = np.arange(7)[None] < 6
  params = nn.unbox(jax.jit(router.init)(jax.random.key(0), x, is_token, ids))
  table = np.asarray(params['params'][EXPERTS_OF_IDS])
  assert table.shape == (V, X)
  assert (table[:, 0] != table[:, 1]).all()
  assert {*table.ravel()} <= {*range(E)}
  routing = jax.jit(router.apply)(params, x, is_token, ids)
  np.testing.assert_array_equal(routing.experts_JMX, table[ids].astype(int))
  scores = np.sqrt(np.log1p(np.exp(x @ params['params']['gate'])))
  wanted = np.take_along_axis(scores, table[ids].astype(int), -1)
  wanted = 1.5 * wanted / wanted.sum(-1, keepdims=True) * is_token[..., None]
  np.testing.assert_allclose(routing.weights_JMX, wanted, rtol=1e-5)

  def total(params):
    return jnp.square(router.apply(params, x, is_token, ids).weights_JMX).sum()

  grads = jax.jit(jax.grad(total))(params)['params']
  assert np.asarray(grads['gate']).any()
  assert not np.asarray(grads[EXPERTS_OF_IDS]).any()
  assert is_never_trained(f'transformer/first_1/ff_layer/experts/router/{EXPERTS_OF_IDS}')


REFUSED = {
  'NUM_PREDICTION_MODULES=1 is not supported': dict(NUM_PREDICTION_MODULES=1),
  'needs a mesh without an axis stage': dict(
    MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1],
  ),
  'BLOCK_ORDER=parallel needs NORM_POLICY=pre, and blocks as': dict(BLOCK_ORDER='parallel'),
  'NUM_KV_HEADS=2 is not supported': dict(NUM_KV_HEADS=2),
  'USE_ATTENTION_SINKS=False is not': dict(USE_ATTENTION_SINKS=False),
  'ATTEN_LOGIT_CAP=50 is not': dict(ATTEN_LOGIT_CAP=50.0),
  r"must have sliding, sparse_windows and windows": dict(ATTENTION_PATTERN=['full']),
  'needs a SLIDING_WINDOW above 0': dict(SLIDING_WINDOW=0),
  'not divisible by OUTPUT_GROUPS=3': dict(OUTPUT_GROUPS=3),
  'INDEXER_DIMS_PER_HEAD=32 must be at least the 64': dict(INDEXER_DIMS_PER_HEAD=32),
  'ROUTER=top_k is not supported': dict(ROUTER='top_k', ROUTER_SCORES='softmax',
                                          EXPERT_WEIGHT_SCALE=1.0),
  'ROUTER_SCORES=sigmoid is not supported': dict(ROUTER_SCORES='sigmoid'),
  'QUERY_LATENT_DIMS must be above 0': dict(QUERY_LATENT_DIMS=0),
  'FROZEN_DTYPE=bfloat16 cannot hold': dict(FROZEN_DTYPE='bfloat16', NUM_EXPERTS=384),
}  # fmt: skip


@pytest.mark.parametrize('message', REFUSED)
def test_values_that_are_refused(message):
  with pytest.raises(UserError, match=re.compile(message)):
    DeepSeekV4(**REFUSED[message]).validate()
