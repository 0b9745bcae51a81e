"""Attention by cuDNN: its requests, computed by XLA, and the cases without a request."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import cudnn_attention
from paxlite.layers.attention import DotProductAttention
from paxlite.layers.attention_kernel import AttentionKernel
from paxlite.layers.relative_bias import RelativeBias
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh

CUDNN = functools.partial(AttentionKernel, fused=True)
SEGMENTS = jnp.where(jnp.arange(32) < 11, 1, jnp.where(jnp.arange(32) < 27, 2, 0))[None]


def qkv(kv_heads: int = 4, length: int = 32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (2, length, 4, 8), (2, length, kv_heads, 8), (2, length, kv_heads, 8)
  return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.fixture
def asked(monkeypatch):
  """Records each request to cuDNN, and lets XLA compute it."""
  found = []
  compute = jax.nn.dot_product_attention

  def answer(*args, implementation, **kwargs):
    assert implementation == 'cudnn'
    found.append(kwargs)
    return compute(*args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', answer)
  monkeypatch.setattr(cudnn_attention, '_has_kernel', lambda q, k: True)
  return found


@pytest.mark.parametrize('mesh', [False, True])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('case', ['plain', 'grouped', 'window'])
def test_cudnn_is_asked_for_the_same(asked, case, packed, mesh):
  """Compares output and gradients, with and without the shard_map of a mesh."""
  values = dict(query_scale=0.5, window=6 if case == 'window' else 0)
  arrays = qkv(2 if case == 'grouped' else 4)
  segments = SEGMENTS.repeat(2, 0) if packed else None

  def grad(module):
    def value(arrays):
      y = module.apply({}, *arrays, segments)
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(value, has_aux=True))(arrays)

  (_, expected), grads = grad(DotProductAttention(**values))
  assert not asked
  rules = partitioning.rules_for(['replica', 'data', 'mdl'])
  one = make_mesh([1, 1, 1], [1, 1, 1], ['replica', 'data', 'mdl'], jax.devices()[:1])
  with partitioning.activate(one, rules) if mesh else contextlib.nullcontext():
    (_, y), grads2 = grad(DotProductAttention(**values, kernel_tpl=CUDNN))
  assert asked
  assert all(a['is_causal'] and (a['mask'] is not None) == packed for a in asked)
  np.testing.assert_allclose(y, expected, atol=1e-6)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), grads, grads2)


@pytest.mark.parametrize(
  'values',
  [
    dict(logit_cap=30.0),
    dict(extra_logit=0.0),
    dict(relative_bias_tpl=lambda name: RelativeBias(4, name=name)),
    dict(dropout=0.1),
  ],
  ids=lambda v: next(iter(v)),
)
def test_cudnn_is_not_asked_for_what_it_has_not(asked, values):
  arrays = qkv()
  both = [
    DotProductAttention(query_scale=0.5, kernel_tpl=kernel, **values)
    for kernel in (AttentionKernel, CUDNN)
  ]
  rngs = {'dropout': jax.random.key(2)}
  variables = both[0].init({'params': jax.random.key(1), **rngs}, *arrays)
  expected, found = (m.apply(variables, *arrays, rngs=rngs) for m in both)
  assert not asked
  np.testing.assert_array_equal(found, expected)


def test_where_there_is_a_kernel(monkeypatch):
  """There is one on GPUs, for 16 bits, whole sequences, and heads that stay with their keys."""
  rules = partitioning.rules_for(['replica', 'data', 'mdl', 'context'])

  def fits(
    T=64, S=64, N=8, G=8, H=64, dtype=jnp.bfloat16, platform='cuda', capability='8.0', **sizes
  ):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    shape = dict(replica=1, data=1, mdl=1, context=1) | sizes
    mesh = types.SimpleNamespace(devices=np.array([device]), shape=shape)
    monkeypatch.setattr(partitioning, 'active_mesh', lambda: (mesh, rules))
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    return cudnn_attention._has_kernel(abstract(2, T, N, H), abstract(2, S, G, H))

  assert fits()
  assert fits(dtype=jnp.float16, data=4, mdl=4)
  assert fits(G=2, mdl=2, platform='gpu')
  assert not fits(platform='cpu')
  assert not fits(platform='tpu')
  assert not fits(dtype=jnp.float32)
  assert not fits(T=1)
  assert not fits(T=33, S=33)
  assert not fits(H=60)
  assert not fits(H=256)
  assert fits(H=256, capability='9.0')
  assert fits(H=256, capability='10.3')
  assert not fits(H=264, capability='9.0')
  assert not fits(G=2, mdl=4)
  assert not fits(context=2)
  assert not fits(stage=2)
