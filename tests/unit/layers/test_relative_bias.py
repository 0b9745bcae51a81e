"""T5's bias of attention logits: its values and gradients, and what devices add up."""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.experiments.glam import layers as relative_bias
from paxlite.experiments.glam.layers import RelativeBias
from paxlite.layers.attention.attention import DotProductAttention


def buckets(distances, num_buckets, max_distance):
  """T5's buckets, one distance at a time."""
  single = num_buckets // 2

  def one(distance):
    if distance < single:
      return max(distance, 0)
    share = math.log(distance / single) / math.log(max_distance / single)
    return min(single + int(share * single + 1e-6), num_buckets - 1)

  return np.vectorize(one)(distances)


@pytest.fixture(params=['cpu', 'gpu', 'tpu'])
def platform(request, monkeypatch):
  monkeypatch.setattr(relative_bias, 'active_platform', lambda: request.param)
  return request.param


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
  ('T', 'S', 'start', 'max_distance'),
  [
    (9, 9, 0, 64),
    (48, 48, 0, 40),
    (512, 512, 0, 128),
    (384, 384, 0, 300),
    (1, 40, 33, 64),
    (3, 9, 4, 64),
  ],
)
def test_values_and_gradients_are_those_of_the_buckets(platform, T, S, start, max_distance):
  module = RelativeBias(2, num_buckets=16, max_distance=max_distance)
  wrb = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
  grad_NTS = np.random.default_rng(1).normal(size=(2, T, S)).astype(np.float32)
  distances = start + np.arange(T)[:, None] - np.arange(S)
  grad_NTS[:, distances < 0] = 0  # attention masks what a query must not see
  at = buckets(distances, 16, max_distance)

  @jax.jit
  def bias(wrb):
    return module.apply({'params': {'wrb': wrb}}, 2, T, S, start)

  found, pull = jax.vjp(bias, wrb)
  assert found.shape == (1, 2, T, S)
  np.testing.assert_array_equal(np.where(distances < 0, 0, found[0]), wrb[:, at] * (distances >= 0))
  expected = np.zeros((2, 16))
  for n in range(2):
    np.add.at(expected[n], at, grad_NTS[n].astype(np.float64))
  assert np.abs(pull(grad_NTS[None])[0] - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
def test_devices_add_up_gradients_of_the_weight_alone(platform, monkeypatch):
  """Groups of rows, which are on different devices, meet only in the gradient [N, buckets]."""
  B, T, N = 6, 32, 2
  attention = DotProductAttention(
    query_scale=0.5, sink_logit=0.0, relative_bias_tpl=lambda name: RelativeBias(N, name=name)
  )
  qkv = jax.random.normal(jax.random.key(0), (3, B, T, N, 4))
  variables = meta.unbox(jax.jit(attention.init)(jax.random.key(1), *qkv))

  def value(variables, qkv):
    return jnp.sin(attention.apply(variables, *qkv)).sum()

  def shapes(jaxpr):
    for e in jaxpr.eqns:
      yield from (v.aval.shape for v in e.outvars)
      for inner in jax.extend.core.jaxprs_in_params(e.params):
        yield from shapes(inner)

  expected = jax.jit(jax.value_and_grad(value, (0, 1)))(variables, qkv)
  monkeypatch.setattr(
    relative_bias, 'shards_of', lambda name, size: {'batch': 3, 'length': 1}[name]
  )
  grad = jax.value_and_grad(lambda v, qkv: value(v, qkv), (0, 1))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
    jax.jit(grad)(variables, qkv),
    expected,
  )
  made = set(shapes(jax.make_jaxpr(grad)(variables, qkv).jaxpr))
  assert (3, N, T, T) in made
  assert not made & {(N, T, T), (1, N, T, T)}
