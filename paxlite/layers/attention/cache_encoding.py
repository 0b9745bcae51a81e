"""Keys and values as the cache of generation stores them: as they are, or in 8 bits.

In 8 bits, the key or value of a token and head is a vector of numbers times one scale, bfloat16. So
a token is encoded once, when it is computed. A scale for a page of tokens would have to be chosen
before the page is full, or its tokens encoded again. MaxText's kv_quant_axis=dkv has these scales.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from paxlite.core.variable_names import SCALE
from paxlite.layers.attention.paged_vectors import PagedVectors

DTYPES = 'int8', 'float8_e4m3fn'
_active: contextvars.ContextVar[str | None] = contextvars.ContextVar('kv_cache_dtype', default=None)


@struct.dataclass
class EncodedVectors:
  """Vectors in 8 bits, which attention takes in the place of an array."""

  numbers: jax.Array  # [B, S, K, H], of one of DTYPES
  scale: jax.Array  # [B, S, K]

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the vectors, [B, S, K, H]."""
    return self.numbers.shape

  @property
  def dtype(self) -> jnp.dtype:
    """The dtype of the numbers."""
    return self.numbers.dtype

  def decoded(self, dtype: jnp.dtype) -> jax.Array:
    """Returns the vectors as an array."""
    return (self.numbers.astype(jnp.float32) * self.scale[..., None]).astype(dtype)


Stored: TypeAlias = jax.Array | EncodedVectors | PagedVectors


@contextlib.contextmanager
def activate(dtype: str | None) -> Iterator[None]:
  """Makes `encoded` encode by this dtype while a program is traced; None: it keeps arrays."""
  token = _active.set(dtype)
  try:
    yield
  finally:
    _active.reset(token)


def encoded(x_BTKH: jax.Array) -> jax.Array | EncodedVectors:
  """Returns keys or values of new tokens as the cache stores them."""
  name = _active.get()
  if name is None:
    return x_BTKH
  dtype = jnp.dtype(name)
  is_integer = jnp.issubdtype(dtype, jnp.integer)
  most = float((jnp.iinfo if is_integer else jnp.finfo)(dtype).max)
  x_BTKH = x_BTKH.astype(jnp.float32)
  scale_BTK = (jnp.abs(x_BTKH).max(-1) / most).astype(jnp.bfloat16)
  scale_BTK = jnp.where(scale_BTK == 0, 1, scale_BTK)  # of zeros; a NaN stays one
  numbers_BTKH = jnp.clip(x_BTKH / scale_BTK[..., None], -most, most)
  numbers_BTKH = jnp.round(numbers_BTKH) if is_integer else numbers_BTKH
  return EncodedVectors(numbers_BTKH.astype(dtype), scale_BTK)


def arrays_of(name: str, stored: jax.Array | EncodedVectors) -> dict[str, jax.Array]:
  """Returns the arrays of what the cache stores under a name, in the order of jax.tree.leaves."""
  names = (name, name + SCALE) if isinstance(stored, EncodedVectors) else (name,)
  return dict(zip(names, jax.tree.leaves(stored), strict=True))


def slot_axis(name: str) -> int:
  """Returns the dimension of the slots in an array of the cache, […, S, H] or scales […, S]."""
  return -1 if name.endswith(SCALE) else -2
