"""The experts that each token has passed, as one number, so that two computations can be compared.

Mixtures of experts sow their choices into the collection CHOSEN if the caller makes it mutable.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlite.core.trees import PyTree
from paxlite.layers.sown import CHOSEN

_MOST_EXPERTS = 1 << 16  # of a layer


def numbers(variables: Mapping[str, PyTree], shape: tuple[int, ...]) -> jax.Array:
  """Returns a number of the experts that each token [B, T] has in all layers, uint32.

  It does not depend on their order, and two sets have the same number with the probability 2^−32.
  Without mixtures of experts it is 0.

  Args:
    variables: The variables of a model that was called with CHOSEN mutable.
    shape: (B, T).
  """
  total, first = jnp.zeros(shape, jnp.uint32), 0
  for experts in jax.tree.leaves(variables.get(CHOSEN, {})):
    layers_LBTX = experts.reshape(-1, *shape, experts.shape[-1]).astype(jnp.uint32)
    number_L = first + jnp.arange(len(layers_LBTX), dtype=jnp.uint32)
    first += len(layers_LBTX)
    pairs = number_L[:, None, None, None] * _MOST_EXPERTS + layers_LBTX
    total += _mixed(pairs).sum((0, -1), dtype=jnp.uint32)
  return total


def _mixed(x: jax.Array) -> jax.Array:
  """Returns numbers whose bits each depend on all bits of x (the finalizer of MurmurHash3)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
