"""The keys that an indexer chooses, and that nothing trains it."""

import fiddle as fdl
import flax
import jax
import numpy as np
import pytest
from fiddle import selectors
from flax import linen as nn

from paxlite.adapters.lora import LoraProjection
from paxlite.experiments.deepseek_sparse import DeepSeekV3_2
from paxlite.experiments.deepseek_sparse.layers import SparseIndexer

B, T, D, Q, N, H, K = 2, 10, 8, 6, 12, 6, 3
SIZES = dict(model_dims=D, query_latent_dims=Q, num_heads=N, head_dim=H, rotary_dims=4)


def arrays():
  rng = np.random.default_rng(0)
  positions = np.tile(np.arange(T), (B, 1))
  return *(rng.normal(size=(B, T, n)).astype(np.float32) for n in (D, Q)), positions


@pytest.fixture(scope='module')
def params():
  made = jax.jit(SparseIndexer(top_k=K, **SIZES).init)(jax.random.key(0), *arrays())
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32), nn.unbox(made))


def chosen(params, segments=None):
  bias = jax.jit(SparseIndexer(top_k=K, **SIZES).apply)(params, *arrays(), segments)
  assert bias.shape == (B, 1, T, T)
  return np.asarray(bias[:, 0] == 0)


def test_a_query_sees_as_many_keys_as_are_to_be_chosen(params):
  seen = chosen(params) & np.tri(T, dtype=bool)
  wanted = np.minimum(np.arange(T) + 1, K)
  np.testing.assert_array_equal(seen.sum(-1), np.tile(wanted, (B, 1)))
  late = seen[:, K:]
  assert (late != late[0, 0]).any()  # not the same keys for all queries


def test_keys_of_another_segment_take_no_place(params):
  cut = 6
  segments = np.tile(np.where(np.arange(T) < cut, 1, 2), (B, 1))
  packed = chosen(params, segments)
  same = (segments[:, :, None] == segments[:, None]) & np.tri(T, dtype=bool)
  wanted = np.minimum(same.sum(-1), K)
  np.testing.assert_array_equal((packed & same).sum(-1), wanted)
  first = chosen(params)[:, :cut] & np.tri(T, dtype=bool)[:cut]
  np.testing.assert_array_equal((packed & same)[:, :cut], first)


def test_rows_of_no_more_tokens_see_all(params):
  assert SparseIndexer(top_k=T, **SIZES).apply(params, *arrays()) is None


def test_a_choice_has_no_gradient(params):
  def total(params, x, latent):
    return SparseIndexer(top_k=K, **SIZES).apply(params, x, latent, arrays()[2]).sum()

  grads = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(params, *arrays()[:2])
  assert all((g == 0).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
  'values',
  [
    {},
    dict(NUM_PREDICTION_MODULES=1, PREDICTION_LOSS_WEIGHT=0.0),
    dict(TRAINABLE_VARIABLES=['transformer/.*', 'predictions_0/.*']),
  ],
  ids=str,
)
def test_indexers_are_frozen(values):
  e = DeepSeekV3_2(**values)
  optimizer = fdl.build(e.build_task()).optimizer
  layer = 'transformer/repeat/x_layers_0/self_attention'
  names = f'{layer}/indexer/key/w', f'{layer}/query/w', 'predictions_0/block/query/w'
  params = flax.traverse_util.unflatten_dict(dict.fromkeys(names, 1.0), sep='/')
  trained = flax.traverse_util.flatten_dict(optimizer.split(params)[0], sep='/')
  is_trained = [trained[name] is not None for name in names]
  assert is_trained == [False, True, 'PREDICTION_LOSS_WEIGHT' not in values]


def test_indexers_have_no_factors_of_lora():
  e = DeepSeekV3_2(USE_LORA=True)
  model = e.build_task().model
  indexers = list(selectors.select(model, SparseIndexer))
  assert indexers
  assert not any(
    list(selectors.select(indexer, LoraProjection, check_nonempty=False)) for indexer in indexers
  )
  assert fdl.build(e.build_task()).model is not None
