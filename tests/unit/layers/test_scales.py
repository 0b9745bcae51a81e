"""Factors of activations, and blocks whose two layers stand side by side."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers.attention.attention import Attention, CombinedQkv, DotProductAttention
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.norms import RmsNorm
from paxlite.layers.scales import PositionScale, Scale
from paxlite.layers.transformer import ParallelBlock


def test_a_scale_keeps_the_dtype():
  x = jnp.asarray([1.0, 3.0], jnp.bfloat16)
  y = Scale(0.5).apply({}, x)
  assert y.dtype == x.dtype
  assert y.tolist() == [0.5, 1.5]


def test_queries_grow_with_whole_multiples_of_the_length():
  ones = jnp.ones((1, 9, 2, 4))
  positions = jnp.arange(9)[None]
  y = PositionScale(growth=0.7, length=4).apply({}, ones, positions)
  expected = 1 + 0.7 * np.log([1, 1, 1, 1, 2, 2, 2, 2, 3])
  np.testing.assert_allclose(y[0, :, 0, 0], expected, rtol=1e-6)
  later = PositionScale(growth=0.7, length=4, first=1).apply({}, ones, positions)
  np.testing.assert_allclose(later[0, :8, 1, 3], expected[1:], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('has_two_norms', [False, True])
def test_a_parallel_block_adds_both_layers_of_the_same_activations(has_two_norms):
  sizes = dict(model_dims=8, num_heads=2, head_dim=4)
  attention = functools.partial(
    Attention, qkv_tpl=functools.partial(CombinedQkv, **sizes),
    attention_tpl=functools.partial(DotProductAttention, 0.5), **sizes,
  )  # fmt: skip
  ffn = functools.partial(FeedForward, model_dims=8, hidden_dims=16)
  block = ParallelBlock(
    norm_tpl=RmsNorm, ff_norm_tpl=RmsNorm if has_two_norms else None, attention_tpl=attention,
    ffn_tpl=ffn,
  )  # fmt: skip
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  positions = jnp.arange(5)[None]
  params = jax.jit(block.init)(jax.random.key(1), x, positions, None)['params']
  noise = lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape)
  params = jax.tree.map(noise, params)
  assert ('ff_layer_norm' in params) == has_two_norms
  of = lambda module, name, *args: jax.jit(module.apply)({'params': params[name]}, *args)
  h = of(RmsNorm(), 'layer_norm', x)
  before_ffn = of(RmsNorm(), 'ff_layer_norm', x) if has_two_norms else h
  expected = x + of(attention(), 'self_attention', h, positions) + of(ffn(), 'ff_layer', before_ffn)
  y = jax.jit(block.apply)({'params': params}, x, positions, None)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
