"""Products of rows with the matrix of their group, by what the platform does best.

No other module makes this choice.
"""

import jax
import jax.numpy as jnp

from paxlite.layers import megablox_product, triton_product
from paxlite.parallel.partitioning import active_platform


def alignment(w_EDF: jax.Array) -> int:
  """Returns the number that must divide the number of rows of each group."""
  if _on_gpu(w_EDF):
    return triton_product.ROWS
  return megablox_product.ROWS if _on_tpu(w_EDF) else 1


def grouped_product(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns y[p] = x[p]·w[e], [P, F], where e is the group of row p.

  Args:
    x_PD: Rows, sorted by group; P is a multiple of the alignment.
    w_EDF: A matrix for each group.
    sizes_E: The number of rows of each group, multiples of the alignment. What rows after their
      sum give is undefined, also in the gradient.
  """
  if _on_gpu(w_EDF):
    return triton_product.product(x_PD, w_EDF, sizes_E)
  if _on_tpu(w_EDF):
    return megablox_product.product(x_PD, w_EDF, sizes_E)
  return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E.astype(jnp.int32))


def _on_gpu(w_EDF: jax.Array) -> bool:
  return active_platform() in ('gpu', 'cuda') and triton_product.computes(w_EDF)


def _on_tpu(w_EDF: jax.Array) -> bool:
  return active_platform() == 'tpu' and megablox_product.computes(w_EDF)
