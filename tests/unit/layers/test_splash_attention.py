"""Attention by splash, in Pallas' interpreter: output and gradients are those of plain XLA."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from paxlite.experiments.glam.layers import RelativeBias
from paxlite.layers import remat
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention import AttentionSinks, DotProductAttention
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.softmax_attention import Softmax
from paxlite.layers.attention.splash_attention import SplashKernel
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh

SPLASH = functools.partial(AttentionKernel, fused=True)
T = 256
SEGMENTS = jnp.where(jnp.arange(T) < 100, 1, jnp.where(jnp.arange(T) < 230, 2, 0))[None]


def qkv(kv_heads: int = 4, rows: int = 2, value_width: int = 64):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (rows, T, 4, 64), (rows, T, kv_heads, 64), (rows, T, kv_heads, value_width)
  return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.fixture
def asked(monkeypatch):
  """Counts the calls of splash, which is taken on this CPU too."""
  found = []
  attend = SplashKernel.attend_locally

  def counted(*args, **kwargs):
    found.append(args)
    return attend(*args, **kwargs)

  monkeypatch.setattr(SplashKernel, 'attend_locally', counted)
  monkeypatch.setattr(SplashKernel, 'platform', 'cpu')
  return found


CASES = {
  'plain': {},
  'window': dict(window=60),
  'cap': dict(logit_cap=3.0),
  'attention sink': dict(sink_logit=0.7),
  'all': dict(window=130, logit_cap=3.0, sink_logit=0.0),
  'narrow values': {},  # as in latent attention
}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  ('case', 'kv_heads', 'packed', 'mesh'),
  [
    ('plain', 4, False, False),
    ('plain', 2, True, True),
    ('window', 4, True, False),
    ('cap', 1, False, False),
    ('attention sink', 4, True, False),
    ('all', 2, True, True),
    ('narrow values', 4, True, True),
  ],
)
def test_splash_computes_the_same(asked, case, kv_heads, packed, mesh):
  values = dict(query_scale=0.125, **CASES[case])
  arrays = qkv(kv_heads, value_width=40 if case == 'narrow values' else 64)
  segments = SEGMENTS.repeat(2, 0) if packed else None

  def grad(module):
    def value(arrays):
      y = module.apply({}, *arrays, segments)
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(value, has_aux=True))(arrays)

  (_, expected), grads = grad(DotProductAttention(**values))
  assert not asked
  axes = ['replica', 'data', 'mdl']
  one = make_mesh([1, 1, 1], [1, 1, 1], axes, jax.devices()[:1])
  active = partitioning.activate(one, partitioning.rules_for(axes))
  with active if mesh else contextlib.nullcontext():
    (_, y), grads2 = grad(DotProductAttention(**values, kernel_tpl=SPLASH))
  assert asked
  np.testing.assert_allclose(y, expected, atol=2e-6)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-5), grads, grads2)


@pytest.mark.slow
@pytest.mark.parametrize(
  'values',
  [dict(relative_bias_tpl=lambda name: RelativeBias(4, name=name)), dict(dropout=0.1)],
  ids=lambda v: next(iter(v)),
)
def test_splash_is_not_asked_for_what_it_has_not(asked, values):
  arrays = qkv(rows=1)
  both = [
    DotProductAttention(query_scale=0.5, kernel_tpl=kernel, **values)
    for kernel in (AttentionKernel, SPLASH)
  ]
  rngs = {'dropout': jax.random.key(2)}
  variables = both[0].init({'params': jax.random.key(1), **rngs}, *arrays)
  expected, found = (m.apply(variables, *arrays, rngs=rngs) for m in both)
  assert not asked
  np.testing.assert_array_equal(found, expected)


def test_where_there_is_a_kernel(monkeypatch):
  """There is one on TPUs, for whole sequences of full blocks; heads stay with their keys."""
  rules = partitioning.rules_for(['replica', 'data', 'mdl', 'context'])

  def fits(T=256, S=256, N=8, K=8, H=64, platform='tpu', **sizes):
    device = types.SimpleNamespace(platform=platform)
    shape = dict(replica=1, data=1, mdl=1, context=1) | sizes
    mesh = types.SimpleNamespace(devices=np.array([device]), shape=shape)
    monkeypatch.setattr(partitioning, 'active_mesh', lambda: (mesh, rules))
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    kv = abstract(2, S, K, H)
    case = Case(abstract(2, T, N, H), kv, kv, Softmax(0.5))
    return attention_kernels.refusal(SplashKernel(), case) is None

  assert fits()
  assert fits(H=256, data=4, mdl=4)
  assert fits(K=2, mdl=2)
  assert fits(stage=2)
  assert not fits(platform='cpu')
  assert not fits(platform='cuda')
  assert not fits(T=1)
  assert not fits(T=192, S=192)
  assert not fits(K=2, mdl=4)
  assert not fits(context=2)


@pytest.mark.parametrize(
  ('policy', 'runs'),
  [('SAVE_NOTHING', 2), ('SAVE_ATTENTION', 1), ('SAVE_QKV_ATTENTION_OUT_PROJ', 1)],
)
def test_a_policy_keeps_what_the_backward_kernels_read(asked, policy, runs):
  """Else the forward kernel runs once more in the backward pass."""
  module = DotProductAttention(query_scale=0.125, kernel_tpl=SPLASH)
  value = jax.checkpoint(
    lambda arrays: module.apply({}, *arrays).sum(), policy=remat.jax_policy(policy)
  )
  program = jax.make_jaxpr(jax.value_and_grad(value))(qkv()).jaxpr
  # as XLA does, without what nothing uses
  program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
  assert str(program).count('name=splash_mha_fwd') == runs
  assert str(program).count('name=splash_mha_dkv') == 1
  # the kernel writes each sum 128 times, which is twice the context here
  _, pull = jax.vjp(value, qkv())
  assert max(x.size for x in jax.tree.leaves(pull)) == qkv()[0].size


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [False, True])
def test_sinks_and_their_gradients(asked, mesh):
  """Each head has a learned logit, as in gpt-oss."""
  sinks = functools.partial(AttentionSinks, num_heads=4)
  logits = jnp.asarray([0.5, -1.0, 2.0, 0.0])
  values = dict(query_scale=0.125, window=60, sinks_tpl=sinks)

  def grad(module):
    def value(logits, arrays):
      y = module.apply({'params': {'sinks': {'logits': logits}}}, *arrays, SEGMENTS.repeat(2, 0))
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(logits, qkv(2))

  (_, expected), grads = grad(DotProductAttention(**values))
  assert not asked
  one = make_mesh([1, 1, 1], [1, 1, 1], ['replica', 'data', 'mdl'], jax.devices()[:1])
  with partitioning.activate(one, partitioning.DEFAULT_RULES) if mesh else contextlib.nullcontext():
    (_, y), found = grad(DotProductAttention(**values, kernel_tpl=SPLASH))
  assert asked
  np.testing.assert_allclose(y, expected, atol=1e-5)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
    np.testing.assert_allclose(one, other, atol=2e-5)
