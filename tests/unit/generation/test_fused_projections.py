"""Weights that are fused for decoding: the same logits, nothing moved, and what stays apart."""

import copy
import dataclasses
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fiddle import selectors
from flax.linen import meta

from paxlite.core.trees import PyTree
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.llama import LLaMA
from paxlite.generation.engine import Engine
from paxlite.generation.fused_layers import FusedQkv
from paxlite.generation.fused_projections import FusedProjections
from paxlite.layers.attention.attention import Attention, SeparateQkv
from paxlite.layers.feedforward import GatedFeedForward
from paxlite.layers.transformer import TransformerBlock, UnrolledTransformer
from paxlite.parallel.partitioning import DEFAULT_RULES
from paxlite.quantization.frozen_weights import put_scheme
from paxlite.quantization.schemes import Int8, QuantizationScheme
from tests.support.decode_program import decode_program

SMALL = dict(NUM_LAYERS=2, NUM_HEADS=4, MODEL_DIMS=32, VOCAB_SIZE=97, MAX_SEQ_LEN=64,
             FPROP_DTYPE='float32', USE_REPEATED_LAYER=False)  # fmt: skip
MODELS = {
  'combined, with a bias': GPT126M(**SMALL),
  'combined': LLaMA(**SMALL, HIDDEN_DIMS=48),
  'grouped': LLaMA(**SMALL, HIDDEN_DIMS=48, NUM_KV_HEADS=2),
  'grouped, with a bias': LLaMA(**SMALL, HIDDEN_DIMS=48, NUM_KV_HEADS=2, USE_QKV_BIAS=True),
}
IDS = np.random.default_rng(0).integers(1, 97, (2, 16))


def one_device() -> jax.sharding.Mesh:
  return MODELS['combined'].mesh(jax.devices()[:1])


def values(config: fdl.Config) -> PyTree:
  """Parameters of a model that are all random, the biases too."""
  model = fdl.build(config).model
  shapes = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), IDS))['params']
  leaves, tree = jax.tree.flatten(shapes)
  rng = np.random.default_rng(1)

  def one(like: jax.ShapeDtypeStruct) -> jax.Array:
    whole = rng.integers(-127, 128, like.shape)
    drawn = whole if like.dtype == jnp.int8 else rng.normal(size=like.shape) * 0.1
    return jnp.asarray(drawn, like.dtype)

  return jax.tree.unflatten(tree, [one(x) for x in leaves])


def logits_of(config: fdl.Config, params: PyTree) -> jax.Array:
  return jax.jit(fdl.build(config).model.apply)({'params': params}, IDS)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('scheme', ['', 'int8'])
@pytest.mark.parametrize('name', MODELS)
def test_the_logits_are_the_same_and_the_way_back(name, scheme):
  config = MODELS[name].build_task()
  if scheme:
    put_scheme(config.model, Int8)
  params = values(config)
  expected = logits_of(config, params)
  fused_projections = FusedProjections(config, one_device(), DEFAULT_RULES)
  fused = fused_projections.fused(jax.tree.map(lambda x: x, params))
  names = {'/'.join(str(k.key) for k in path) for path, _ in jax.tree.leaves_with_path(fused)}
  assert not [n for n in names if re.search('combined|/query/|ffn_layer1_gate', n)]
  logits = logits_of(config, fused)
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
  back = fused_projections.unfused(fused)
  jax.tree.map(np.testing.assert_array_equal, back, params)  # the same names, too


def test_no_weight_is_moved_for_a_token():
  """Without joining, XLA's loop over tokens has a transposed weight for each layer."""

  def moved(joins: bool) -> list[str]:
    config = MODELS['combined'].build_task()
    params = values(config)
    if joins:
      params = FusedProjections(config, one_device(), DEFAULT_RULES).fused(params)
    text = decode_program(Engine(fdl.build(config).model, params, 64))
    moves = re.findall(r'= f32\[([\d,]+)\]\S* (?:transpose|copy)\(', text)
    return [x for x in moves if np.prod([int(n) for n in x.split(',')]) >= 32 * 32]

  assert len(moved(False)) >= 2
  assert not moved(True)


class OwnFeedForward(GatedFeedForward):
  """A user's own layer, with the names of paxlite's."""


class OwnAttention(Attention):
  """A user's own layer, with the names of paxlite's."""


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
  ('kind', 'own'), [(GatedFeedForward, OwnFeedForward), (Attention, OwnAttention)]
)
def test_a_layer_of_ones_own_beside_others_stays_as_it_is(kind, own):
  config = MODELS['grouped'].build_task()
  first = copy.deepcopy(next(iter(selectors.select(config.model, TransformerBlock))))
  for layer in selectors.select(first, kind):
    fdl.update_callable(layer, own)
  (stack,) = selectors.select(config.model, UnrolledTransformer)
  stack.first_tpls = [first]
  params = values(config)
  expected = logits_of(config, params)
  weights = FusedProjections(config, one_device(), DEFAULT_RULES)
  fused = weights.fused(jax.tree.map(lambda x: x, params))
  assert 'fused' in str(jax.tree.structure(fused))
  logits = logits_of(config, fused)
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
  jax.tree.map(np.testing.assert_array_equal, weights.unfused(fused), params)


@dataclasses.dataclass(frozen=True)
class Flat(QuantizationScheme):
  """A scheme whose arrays have other dimensions than the weight."""

  def encode(self, w, summed):
    return {'flat': w.reshape((-1, *[1] * (w.ndim - 1)))}

  def decode(self, arrays, shape):
    return arrays['flat'].reshape(shape)


@pytest.mark.parametrize('kept', ['low rank', 'another scheme'])
def test_other_weights_stay_as_they_are(kept):
  experiment = MODELS['grouped']
  if kept == 'low rank':
    experiment = experiment.replaced(USE_LORA=True, LORA_TARGET_LAYERS='all')
  config = experiment.build_task()
  if kept == 'another scheme':
    put_scheme(config.model, Flat)
  params = values(config)
  expected = logits_of(config, params)
  names = jax.tree.structure(params)
  fused = FusedProjections(config, one_device(), DEFAULT_RULES).fused(params)
  assert jax.tree.structure(fused) == names
  found = logits_of(config, fused)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(('heads', 'qkv'), [(2, FusedQkv), (1, SeparateQkv)])
def test_devices_that_share_key_heads_unevenly(heads, qkv):
  config = LLaMA(**SMALL, HIDDEN_DIMS=48, NUM_KV_HEADS=heads).build_task()
  two = jax.sharding.AbstractMesh((1, 1, 2), ('replica', 'data', 'mdl'))
  FusedProjections(config, two, DEFAULT_RULES)
  kinds = {fdl.get_callable(x.qkv_tpl) for x in selectors.select(config.model, Attention)}
  assert kinds == {qkv}
