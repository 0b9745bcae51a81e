"""What the planner reads from a traced gradient."""

import jax
import jax.numpy as jnp
import pytest

from paxlite.aot.planning import traced
from paxlite.aot.planning.extents import Sizes
from paxlite.layers import cudnn_call


@pytest.mark.parametrize('has_logit', [False, True])
def test_products_of_cudnn(has_logit):
  B, T, N, K, H = 13, 64, 4, 2, 8
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  options = cudnn_call.Options(0.5)

  def loss(qkv, ids):
    logit = jnp.zeros((B, N)) if has_logit else None
    return cudnn_call.attend(*qkv, ids, logit, options).astype(jnp.float32).sum()

  qkv = array(B, T, N, H), array(B, T, K, H), array(B, T, K, H)
  ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
  sizes = Sizes(rows=B, length=T, widths=frozenset({N, K, H}), experts=1)
  work = traced.read(loss, sizes, qkv, ids)
  # two products forward and five backward; the causal mask leaves out half of 2 · T · T · H each
  assert sum(p.flops for p in work.products) == 7 * B * N * T * T * H
