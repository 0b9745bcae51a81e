"""The loop over microbatches: what it computes, where, and that XLA does not know its length."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.experiments.demo import TinyGPT
from paxlite.parallel import partitioning
from paxlite.training import microbatch_loop
from paxlite.training.microbatch_loop import microbatch_scan, opaque_scan


def test_it_computes_what_a_scan_does():
  traces = []

  def body(carry, inputs):
    traces.append(1)
    x, (y,) = inputs
    carry = {'sum': carry['sum'] + shift * x.sum()}
    return carry, (carry['sum'] * y, x[:2])

  def both(shift_):
    nonlocal shift
    shift = shift_  # a value of the trace outside
    carry, inputs = {'sum': jnp.float32(0.1)}, (xs, [ys])
    return jax.lax.scan(body, carry, inputs), opaque_scan(body, carry, inputs)

  shift = None
  xs, ys = jnp.linspace(0, 1, 15).reshape(5, 3), jnp.arange(5.0)
  expected, found = jax.jit(both)(jnp.float32(0.7))
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert len(traces) == 2, 'each of the two traces it once'


@pytest.mark.slow
def test_gradients_are_the_same(monkeypatch):
  e = TinyGPT(NUM_MICROBATCHES=4, PERCORE_BATCH_SIZE=8, DROPOUT_PROB=0.1, NUM_LAYERS=1)
  built = fdl.build(e.build_task())
  params = meta.unbox(jax.jit(built.init_params)(jax.random.key(0)))
  ids = np.random.default_rng(0).integers(0, e.VOCAB_SIZE, (8, 33))
  batch = dict(ids=ids[:, :-1], labels=ids[:, 1:], weights=np.ones((8, 32), np.float32))
  results = []
  for scan in (jax.lax.scan, opaque_scan):
    monkeypatch.setattr(microbatch_loop, 'microbatch_scan', lambda scan=scan: scan)
    grads = jax.jit(lambda params, key: built.grads(params, batch, key))
    results.append(grads(params, jax.random.key(1)))
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_the_compiler_does_not_know_its_length():
  xs = jnp.ones((5, 3))
  for scan, is_known in ((jax.lax.scan, True), (opaque_scan, False)):
    run = jax.jit(lambda xs, scan=scan: scan(lambda c, x: (c + x, c * x), jnp.zeros(3), xs))
    assert ('known_trip_count' in run.lower(xs).compile().as_text()) is is_known


@pytest.mark.parametrize(
  ('platform', 'shape', 'is_opaque'),
  [('gpu', (2, 4, 1), True), ('gpu', (1, 1, 1), False), ('tpu', (2, 4, 1), False)],
)
def test_only_several_gpus_need_it(monkeypatch, platform, shape, is_opaque):
  mesh = jax.sharding.AbstractMesh(shape, ('replica', 'data', 'mdl'))
  monkeypatch.setattr(microbatch_loop, 'active_kind', lambda: platform)
  with partitioning.activate(mesh, partitioning.DEFAULT_RULES):
    assert microbatch_scan() is (opaque_scan if is_opaque else jax.lax.scan)
