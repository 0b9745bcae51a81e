"""Attention over context: each way gives the context and the gradients of one device.

`python -m tests.unit.context_parallelism.test_context_attention CASE…` compares on 8 devices of a
CPU.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.context_parallelism import context_attention, halo_attention
from paxlite.layers.attention import (
  blockwise_attention,
  cudnn_attention,
  cudnn_call,
  splash_attention,
  tiled_attention,
)
from paxlite.layers.attention.attention import AttentionSinks, DotProductAttention
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.blockwise_attention import Blockwise
from paxlite.layers.attention.partial_attention import Partial
from paxlite.layers.attention.softmax_attention import Softmax
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from tests.support import runs

# way, context, mdl, heads of keys, window, packed, cap, sinks
CASES = {
  'ring': ('ring', 4, 1, 2, 0, True, 0.0, False),
  'ring of two': ('ring', 2, 2, 4, 0, True, 3.0, True),
  'ring of three': ('ring', 3, 2, 4, 0, True, 0.0, True),
  'ring of eight': ('ring', 8, 1, 8, 0, False, 0.0, True),
  'short texts': ('only if seen', 8, 1, 2, 0, True, 0.0, False),
  'window': ('ring', 4, 1, 2, 12, True, 0.0, True),
  'wide window': ('ring', 4, 2, 2, 40, False, 3.0, False),
  'window in pieces': ('pieces', 4, 1, 2, 6, True, 0.0, False),
  'heads': ('heads', 4, 1, 4, 0, True, 0.0, True),
  'heads and window': ('heads', 2, 2, 4, 12, True, 2.0, False),
  'gather': ('gather', 4, 1, 4, 12, True, 0.0, False),
}
T = 96
AXES = ['replica', 'data', 'mdl', 'context']


def compare(name: str) -> None:
  """Prints the largest relative differences to one device, and collectives of the program."""
  way, size, mdl, kv_heads, window, packed, cap, has_sinks = CASES[name]
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (2, T, 8, 8), (2, T, kv_heads, 8), (2, T, kv_heads, 8)
  qkv = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
  texts = jnp.where(jnp.arange(T) < 52, 1 + jnp.arange(T) // 6, 0)
  two = jnp.where(jnp.arange(T) < 20, 1, jnp.where(jnp.arange(T) < 50, 2, 0))
  cut = texts if way == 'only if seen' else two
  segments = cut[None].repeat(2, 0) if packed else None
  sinks = functools.partial(AttentionSinks, num_heads=8) if has_sinks else None
  logits = {'params': {'sinks': {'logits': jax.random.normal(keys[3], (8,))}}}
  values = dict(query_scale=0.35, window=window, logit_cap=cap, sinks_tpl=sinks)

  def grad(module):
    def value(variables, qkv):
      y = module.apply(variables, *qkv, segments)
      return jnp.sin(y).sum(), y

    arguments = logits if has_sinks else {}, qkv
    of = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True)).lower(*arguments)
    program = of.compile()
    (_, y), grads = program(*arguments)
    return (y, grads), program.as_text()

  expected, _ = grad(DotProductAttention(**values))
  if way == 'pieces':
    attend = halo_attention.attend
    context_attention.halo_attention.attend = lambda *args: attend(*args[:-1], 8)
    way = 'ring'
  blockwise_attention.Blockwise = OnlyIfSeen if way == 'only if seen' else Blockwise
  way = 'ring' if way == 'only if seen' else way
  kernel = functools.partial(AttentionKernel, fused=True, context=way)
  data = min(8 // size // mdl, 2)
  devices = jax.devices()[: data * size * mdl]
  mesh = make_mesh([1, data, mdl, size], [1, 1, 1, 1], AXES, devices)
  with partitioning.activate(mesh, partitioning.rules_for(AXES)):
    found, program = grad(DotProductAttention(**values, kernel_tpl=kernel))
  # in NumPy, because XLA may leave a NaN out of a maximum
  difference = lambda a, b: np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))
  result = {
    'case': name,
    'difference': float(np.max(jax.tree.leaves(jax.tree.map(difference, found, expected)))),
    'permutes': program.count(' collective-permute('),
    'exchanges': program.count(' all-to-all('),
    'scores': f'{T},{T}]' in program,
  }
  print(json.dumps(result), flush=True)


class OnlyIfSeen(Blockwise):
  """Gives no number for a part in which no query sees a key."""

  def forward(self, qkv, segments, causal):
    return self._known(super().forward(qkv, segments, causal), segments)

  def backward(self, qkv, segments, causal, whole, gradient):
    return self._known(super().backward(qkv, segments, causal, whole, gradient), segments)

  def _known(self, found, segments):
    is_seen = (segments[0][:, :, None] == segments[1][:, None]).any()
    return jax.tree.map(lambda x: jnp.where(is_seen, x, jnp.nan), found)


def check(names):
  done = runs.module('tests.unit.context_parallelism.test_context_attention', *names, devices=8)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert [r['case'] for r in results] == names
  for r in results:
    assert r['difference'] < 1e-5, r
    way = CASES[r['case']][0]
    assert bool(r['permutes']) == (way in ('ring', 'only if seen', 'pieces')), r
    assert bool(r['exchanges']) == (way == 'heads'), r
    assert not r['scores'] or way in ('heads', 'gather'), r


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_ring_computes_the_same():
  check(['ring', 'short texts'])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_way_computes_the_same():
  check([name for name in CASES if name not in ('ring', 'short texts')])


def part(queries: int, keys: int, width: int):
  rng = jax.random.split(jax.random.key(0), 4)
  shapes = (2, queries, 4, width), (2, keys, 2, width), (2, keys, 2, width)
  qkv = [jax.random.normal(key, shape) for key, shape in zip(rng, shapes, strict=False)]
  of_q, of_k = (jnp.where(jnp.arange(n) < n // 3, 1, 2)[None].repeat(2, 0) for n in (queries, keys))
  return qkv, (of_q, of_k), jax.random.normal(rng[3], shapes[0])


def same(kernel, other, queries, keys, width, segmented, causal):
  qkv, (of_q, of_k), gradient = part(queries, keys, width)
  segments = (of_q, of_k if causal else of_k[:, ::-1]) if segmented else None
  parts = [jax.jit(k.forward, static_argnums=2)(qkv, segments, causal) for k in (kernel, other)]
  # the backward pass of a part uses the results of all parts together
  whole = Partial(parts[1].context * 0.7, parts[1].lse + 0.4)
  backward = lambda k: jax.jit(k.backward, static_argnums=2)
  both = [backward(k)(qkv, segments, causal, whole, gradient) for k in (kernel, other)]
  for a, b in zip(*(jax.tree.leaves(x) for x in zip(parts, both, strict=True)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


# A ring has parts with as many queries as keys, and half or twice as many.


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('queries', 'keys', 'causal'), [(32, 32, False), (32, 32, True), (16, 32, False), (32, 16, False)]
)
def test_tiles_are_the_same_as_a_whole(queries, keys, causal):
  whole = Blockwise(Softmax(0.4))
  same(tiled_attention.Tiled(whole, 8), whole, queries, keys, 8, True, causal)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('queries', 'keys', 'causal'),
  [(256, 256, False), (256, 256, True), (128, 256, False), (256, 128, False)],
)
@pytest.mark.parametrize('segmented', [False, True])
def test_splash_computes_a_part(segmented, queries, keys, causal):
  """In Pallas' interpreter. This also tests what a function of jax.vjp holds."""
  softmax = Softmax(0.125, logit_cap=3.0)
  splash = splash_attention.SplashParts(softmax)
  same(splash, Blockwise(softmax), queries, keys, 64, segmented, causal)


def test_whole_rows_have_bounds_of_texts(monkeypatch):
  monkeypatch.setattr(cudnn_attention.CudnnKernel, 'reasons', lambda *_: {})
  monkeypatch.setattr(cudnn_call, 'attend', lambda *args: args[-1].max_segments)
  case = Case(
    *[jnp.zeros((1, 8, 2, 8))] * 3, Softmax(0.5), max_segments=7, platform='gpu', capability=9.0
  )
  ids = jnp.ones((1, 8), jnp.int32)
  attention = context_attention.ContextAttention(case)
  assert attention._whole_rows(case.q, case.k, case.v, ids, None) == 7


if __name__ == '__main__':
  for case in sys.argv[1:]:
    compare(case)
