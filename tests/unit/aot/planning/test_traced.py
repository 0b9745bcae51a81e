"""What the planner reads from a traced gradient."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from paxlite.aot.planning import traced
from paxlite.aot.planning.extents import Sizes
from paxlite.layers.attention import cudnn_call
from paxlite.layers.moe import triton_matmul


@pytest.mark.parametrize('has_logit', [False, True])
def test_products_of_cudnn(has_logit):
  B, T, N, K, H = 13, 64, 4, 2, 8
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  options = cudnn_call.Options(0.5)

  def loss(qkv, ids):
    logit = jnp.zeros((B, N)) if has_logit else None
    return cudnn_call.attend(*qkv, ids, logit, None, options).astype(jnp.float32).sum()

  qkv = array(B, T, N, H), array(B, T, K, H), array(B, T, K, H)
  ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
  sizes = Sizes(rows=B, length=T, widths=frozenset({N, K, H}), experts=1)
  work = traced.read(loss, sizes, qkv, ids)
  # two products forward and five backward; the causal mask leaves out half of 2 · T · T · H each
  assert sum(p.flops for p in work.products) == 7 * B * N * T * T * H


def test_a_product_of_groups_of_rows():
  """One forward and two backward, of the rows at equal load, in a kernel that has room for more."""
  B, T, D, F, E = 13, 64, 128, 64, 4
  rows, room = B * T, 1280
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def loss(w_EDF, x):
    with jax.named_scope(f'rows_{rows}_of_{room}'):
      sizes_E = jnp.full(E, 256, jnp.int32)
      return triton_matmul.product(jnp.sin(x), w_EDF, sizes_E).astype(jnp.float32).sum()

  def of_both(arrays, _):
    return loss(*arrays)

  sizes = Sizes(rows=B, length=T, widths=frozenset({D, F}), experts=E)
  work = traced.read(of_both, sizes, (array(E, D, F), array(room, D)), array(B))
  assert sum(p.flops for p in work.products) == 3 * 2 * rows * D * F
  assert {(p.extent.rows, p.extent.length) for p in work.products} == {(1, True)}


def test_other_kernels_read_and_write():
  """A kernel that makes 8 bits of bfloat16 reads two bytes of each number and writes one."""
  B, T, F = 13, 64, 128
  array = jax.ShapeDtypeStruct((B * T, F), jnp.bfloat16)

  def kernel(x_ref, q_ref):
    q_ref[...] = x_ref[...].astype(jnp.float8_e4m3fn)

  narrow = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((B * T, F), jnp.float8_e4m3fn))

  def loss(parameter, x):
    return parameter + 0 * narrow(x).astype(jnp.float32).sum()

  sizes = Sizes(rows=B, length=T, widths=frozenset({F}), experts=1)
  work = traced.read(loss, sizes, jax.ShapeDtypeStruct((), jnp.float32), array)
  moved = sum(work.traffic.values())
  assert 3 * B * T * F <= moved <= 4.5 * B * T * F
