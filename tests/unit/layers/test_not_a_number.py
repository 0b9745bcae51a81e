"""A NaN or an infinity in an argument reaches all that depends on it: no kernel hides it.

A kernel's own maximum may take the other number of two, as Triton's does. cuDNN's kernels run on
GPUs alone: `paxlite doctor --kernels` compares them there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import cross_entropy as cross_entropy_module
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.blockwise_attention import BlockwiseKernel
from paxlite.layers.attention.cpu_attention import CpuKernel
from paxlite.layers.attention.plain_attention import XlaKernel
from paxlite.layers.attention.softmax_attention import Softmax
from paxlite.layers.attention.splash_attention import SplashKernel
from paxlite.layers.cross_entropy import chunked_cross_entropy, cross_entropy
from paxlite.layers.moe import blocked_matmul, megablox_matmul

T, AT = 256, 100
BAD = pytest.mark.parametrize('bad', [np.nan, np.inf])


def is_bad(x):
  return ~np.isfinite(np.asarray(x, np.float32))


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
  'kernel', [BlockwiseKernel(), CpuKernel(), XlaKernel(), SplashKernel()], ids=lambda k: k.name
)
@pytest.mark.parametrize('argument', ['queries', 'keys', 'values', 'gradient'])
def test_attention(kernel, argument):
  """Head 2 of the queries reads head 1 of the keys."""
  shapes = (2, T, 4, 64), (2, T, 2, 64), (2, T, 2, 64), (2, T, 4, 64)
  arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
  number = ['queries', 'keys', 'values', 'gradient'].index(argument)
  head = 2 if shapes[number][2] == 4 else 1
  arrays[number] = arrays[number].at[0, AT, head, 3].set(np.nan)

  @jax.jit
  def run(q, k, v, gradient):
    attend = lambda *qkv: kernel.attend(Case(*qkv, Softmax(0.125)))
    context, pull = jax.vjp(attend, q, k, v)
    return context, pull(gradient)

  context, (dq, dk, dv) = map_bad(run(*arrays))
  reached = np.zeros_like(context)
  if argument == 'queries':
    reached[0, AT, 2] = True
  elif argument == 'keys':
    reached[0, AT:, 2:] = True
  elif argument == 'values':
    reached[0, AT:, 2:, 3] = True
  np.testing.assert_array_equal(context | reached, context)
  assert not context[1].any()
  assert not context[0, :, :2].any()
  expected = {
    'queries': (dq[0, AT, 2], dk[0, : AT + 1, 1], dv[0, : AT + 1, 1]),
    'keys': (dq[0, AT:, 2], dk[0, :, 1], dv[0, :, 1]),
    'values': (dq[0, AT:, 2], dk[0, :, 1]),
    'gradient': (dq[0, AT, 2], dk[0, : AT + 1, 1], dv[0, : AT + 1, 1, 3]),
  }
  assert all(found.all() for found in expected[argument])
  assert not any(d[1].any() for d in (dq, dk, dv))


@pytest.mark.parametrize(
  'product',
  [blocked_matmul.product, functools.partial(megablox_matmul.product, interpret=True)],
  ids=['blocks', 'megablox'],
)
@BAD
def test_products_of_groups(product, bad):
  rows, D, F = 256, 128, 128
  x, w, dy = (
    jax.random.normal(jax.random.key(i), s)
    for i, s in enumerate([(3 * rows, D), (2, D, F), (3 * rows, F)])
  )
  sizes = jnp.array([rows, 2 * rows])

  @jax.jit
  def run(x, w, dy):
    y, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return y, pull(dy)

  y, (dx, dw) = map_bad(run(x.at[300, 5].set(bad), w, dy))
  assert y[300].all()
  assert not np.delete(y, 300, 0).any()
  assert dw[1, 5].all()
  assert not dw[0].any()
  assert not dx.any()
  y, (dx, dw) = map_bad(run(x, w.at[0, 5, 7].set(bad), dy))
  assert y[:rows, 7].all()
  assert not y[rows:].any()
  assert dx[:rows, 5].all()
  assert not dw.any()
  y, (dx, dw) = map_bad(run(x, w, dy.at[300, 7].set(bad)))
  assert dx[300].all()
  assert dw[1, :, 7].all()
  assert not dw[0].any()


@BAD
@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
@pytest.mark.parametrize('cap', [0.0, 30.0])
def test_the_loss(bad, cap, platform, monkeypatch):
  monkeypatch.setattr(cross_entropy_module, 'active_platform', lambda: platform)
  logits = jax.random.normal(jax.random.key(0), (2, 4, 32)).at[0, 1, 5].set(bad)
  labels = jnp.zeros((2, 4), jnp.int32)
  losses, pull = jax.vjp(lambda x: cross_entropy(x, labels, cap).xent, logits)
  (gradient,) = map_bad(pull(jnp.ones((2, 4))))
  reached = np.zeros((2, 4), bool)
  reached[0, 1] = np.isnan(bad) or not cap  # a cap makes 30 of an infinity
  np.testing.assert_array_equal(is_bad(losses), reached)
  np.testing.assert_array_equal(gradient.any(-1), reached)


@pytest.mark.parametrize('cap', [0.0, 30.0])
def test_the_loss_in_chunks(cap):
  x, w = jax.random.normal(jax.random.key(0), (2, 4, 16)), jnp.ones((32, 16))
  labels = jnp.zeros((2, 4), jnp.int32)
  xent = lambda x, w: chunked_cross_entropy(x, w, None, labels, cap, 4).xent
  for arrays, reached in (
    ((x.at[0, 1, 3].set(np.nan), w), np.arange(8).reshape(2, 4) == 1),
    ((x, w.at[5, 3].set(np.nan)), np.ones((2, 4), bool)),
  ):
    losses, pull = jax.vjp(xent, *arrays)
    dx, dw = map_bad(pull(jnp.ones((2, 4))))
    np.testing.assert_array_equal(is_bad(losses), reached)
    np.testing.assert_array_equal(dx.any(-1), reached)
    assert dw.all()


def map_bad(tree):
  return jax.tree.map(is_bad, tree)
