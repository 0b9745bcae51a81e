"""Blocks with inputs of their own, and blocks that read the keys of earlier ones."""

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax import linen as nn

from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.experiments.gemma4 import Gemma4, Gemma4E2B
from paxlite.experiments.glm_latent import GLM5

SMALL = dict(
  NUM_LAYERS=6, NUM_DENSE_BLOCKS=6, NUM_HEADS=4, NUM_KV_HEADS=2, DIMS_PER_HEAD=8, MODEL_DIMS=32,
  FULL_DIMS_PER_HEAD=12, HIDDEN_DIMS=48, VOCAB_SIZE=96, MAX_SEQ_LEN=64, SLIDING_WINDOW=5,
  ATTENTION_PATTERN=['sliding', 'full'], FPROP_DTYPE='float32', USE_REPEATED_LAYER=False,
)  # fmt: skip
LINKED = SMALL | dict(PER_LAYER_EMBEDDING_DIMS=8, NUM_KV_SHARED_LAYERS=3, KV_SHARED_HIDDEN_DIMS=96)
IDS = np.arange(20).reshape(2, 10) * 7 % 96


def made(**values):
  model = fdl.build(Gemma4(**LINKED | values).build_task()).model
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), IDS[:, :1]))['params']
  return model, params


def names_of(tree):
  return {path_name(path) for path, _ in jax.tree.leaves_with_path(tree)}


def test_readers_have_queries_alone():
  shapes = jax.eval_shape(lambda: made()[1])['transformer']
  layers = [names_of(shapes[f'x_layers_{i}']['self_attention']) for i in range(6)]
  keys = {'qkv/key/w', 'qkv/value/w', 'key_norm/scale'}
  assert layers[:3] == 3 * [{'qkv/query/w', 'query_norm/scale', 'post/w'} | keys]
  assert layers[3:] == 3 * [layers[0] - keys]
  widths = [shapes[f'x_layers_{i}']['ff_layer']['ffn_layer2']['w'].shape[0] for i in range(6)]
  assert widths == [48, 48, 48, 96, 96, 96]


def test_a_cache_has_one_copy_of_the_keys_that_are_shared():
  def cache():
    model, params = made()
    return model.apply({'params': params}, IDS, mutable=['cache'])[1]['cache']

  found = {name.split('/')[1] for name in names_of(jax.eval_shape(cache))}
  assert found == {'x_layers_0', 'x_layers_1', 'x_layers_2'}


def test_a_block_reads_the_last_keys_of_its_kind():
  assert Gemma4(**LINKED).key_sources == [None, None, None, 1, 2, 1]
  sources = Gemma4E2B().key_sources
  assert {*sources[:15]} == {None}
  assert sources[15:] == 4 * [13, 13, 13, 13, 14]


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  'values',
  [
    dict(CHECKPOINT_POLICY='SAVE_NOTHING'),
    dict(CHECKPOINT_POLICY='SAVE_DOT_ONLY'),
    dict(CHECKPOINT_POLICY='SAVE_QKV_OUT_PROJ_SEPARATE'),
  ],
)
def test_recomputation_changes_no_gradient(values):
  def gradients(**values):
    # the norm of 8 numbers may be almost 0, and rounding is then 8e-5 of the largest gradient
    model, params = made(**values, PER_LAYER_EMBEDDING_DIMS=16)
    loss = lambda p: (model.apply({'params': p}, IDS) ** 2).mean()
    return jax.jit(jax.grad(loss))(params)

  expected = gradients(CHECKPOINT_POLICY='SAVE_EVERYTHING')
  assert all(np.any(x) for x in jax.tree.leaves(expected['layer_inputs']))
  for x, y in zip(jax.tree.leaves(gradients(**values)), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lora_and_what_it_trains():
  e = Gemma4(**LINKED, USE_LORA=True, LORA_RANK=3)
  task = fdl.build(e.build_task())
  params = nn.unbox(jax.jit(task.init_params)(jax.random.key(0)))
  factors = {name for name in names_of(params) if name.endswith('lora_a')}
  reader = {name for name in factors if '/x_layers_4/self_attention/' in name}
  assert {name.split('self_attention/')[1] for name in reader} == {
    'qkv/query/lora_a', 'post/lora_a'
  }  # fmt: skip
  giver = {name for name in factors if '/x_layers_2/self_attention/' in name}
  assert len(giver) == 4


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    (dict(USE_REPEATED_LAYER=True), 'needs USE_REPEATED_LAYER=False'),
    (dict(NUM_PREDICTION_MODULES=1), 'NUM_PREDICTION_MODULES=1 is not supported with'),
    (dict(NUM_KV_SHARED_LAYERS=6), "leave no earlier block with 'sliding' attention"),
    (dict(NUM_KV_SHARED_LAYERS=5), "leave no earlier block with 'full' attention"),
    (dict(PER_LAYER_EMBEDDING_VOCAB_SIZE=95), 'PER_LAYER_EMBEDDING_VOCAB_SIZE=95 has no rows'),
    (
      dict(MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1]),
      'needs USE_REPEATED_LAYER=True',
    ),
    (dict(USE_TE='layer'), "Transformer Engine's fused layer does not support"),
  ],
)
def test_what_linked_blocks_refuse(values, message):
  Gemma4(**LINKED).validate()
  with pytest.raises(UserError, match=message):
    Gemma4(**LINKED | values).validate()


SHARED = dict(
  NUM_LAYERS=4, NUM_DENSE_BLOCKS=1, NUM_HEADS=2, MODEL_DIMS=16, HIDDEN_DIMS=24, VOCAB_SIZE=96,
  DIMS_PER_HEAD=6, VALUE_DIMS_PER_HEAD=6, ROTARY_DIMS_PER_HEAD=4, LATENT_DIMS=8, MAX_SEQ_LEN=64,
  QUERY_LATENT_DIMS=8, INDEXER_HEADS=2, INDEXER_DIMS_PER_HEAD=6, INDEXER_TOP_K=3, NUM_EXPERTS=4,
  NUM_EXPERTS_PER_TOKEN=2, EXPERT_HIDDEN_DIMS=8, FPROP_DTYPE='float32', NUM_PREDICTION_MODULES=1,
  INDEXER_TYPES=['full', 'shared', 'shared', 'full'],
)  # fmt: skip


def test_shared_indexers_are_there_once():
  """A module that predicts further tokens has one of its own."""
  e = GLM5(**SHARED)
  e.validate()
  assert not e.USE_REPEATED_LAYER
  assert e.key_sources == [None, 0, 0, None]

  def variables():
    model = fdl.build(e.build_task()).model
    params = nn.unbox(model.init(jax.random.key(0), IDS))['params']
    return params, model.apply({'params': params}, IDS, mutable=['cache'])[1]['cache']

  for tree in jax.eval_shape(variables):
    names = {name for name in names_of(tree) if '/indexer/' in name}
    layers = {name.split('/self_attention')[0] for name in names}
    assert layers - {'predictions_0/block'} == {'transformer/x_layers_0', 'transformer/x_layers_3'}


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    (dict(INDEXER_TYPES=['full', 'shared']), "begin with 'full' and have NUM_LAYERS=4 items"),
    (dict(INDEXER_TYPES=['shared'] + 3 * ['full']), "not 4 from 'shared' on"),
    (dict(INDEXER_TYPES=4 * ['half']), "INDEXER_TYPES must be list.one of 'full', 'shared'"),
    (dict(USE_REPEATED_LAYER=True), "INDEXER_TYPES with 2 × 'shared' needs"),
  ],
)
def test_what_shared_indexers_refuse(values, message):
  with pytest.raises(UserError, match=message):
    GLM5(**SHARED | values).validate()
