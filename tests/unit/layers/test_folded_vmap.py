"""Rows of several calls are computed in one."""

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.layers.attention.folded_vmap import with_folded_vmap


def test_a_vmap_of_rows_is_one_call_with_more_rows():
  calls = []

  def function(x, y, keep):
    calls.append(x.shape)
    return jnp.where(keep, jnp.sin(x) * y, 0)

  x, y = jax.random.normal(jax.random.key(0), (2, 3, 2, 4, 5))
  keep = x[:, 0] > 0  # the same for all rows of the second dimension
  over = lambda f: jax.vmap(jax.vmap(f, in_axes=(0, 0, None)))
  total = lambda f: lambda x, y: (over(f)(x, y, keep) ** 2).sum()
  expected = jax.grad(total(function), argnums=(0, 1))(x, y)
  calls.clear()
  found = jax.jit(jax.grad(total(with_folded_vmap(function)), argnums=(0, 1)))(x, y)
  assert (24, 5) in calls
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
