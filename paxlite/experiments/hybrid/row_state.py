"""The state that layers without keys keep of a sequence: arrays of constant size.

A cache of keys may hold anything behind the tokens of a row. A state must not have seen it, so the
caller says how many of the tokens of a call count.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.variable_names import COUNT, INDEX, STATE
from paxlite.layers.attention.attention import is_decoding

MOST_OF_A_STEP = 4  # tokens of a row that one step of generation computes, with drafts


class RowState:
  """The arrays that a layer keeps of B rows, for later tokens; without a cache it keeps nothing.

  Args:
    module: The layer, which makes one of these in a call.
    rows: B.
    tokens: T, the number of tokens of the call.

  Attributes:
    is_kept: Whether there is a cache.
  """

  def __init__(self, module: nn.Module, rows: int, tokens: int):
    self._module, self._rows, self._tokens = module, rows, tokens
    self.is_kept = is_decoding(module)
    self._is_first = True
    if not self.is_kept:
      return
    self._is_first = not module.has_variable('cache', INDEX)
    index = module.variable('cache', INDEX, lambda: jnp.zeros(rows, jnp.int32))
    count = module.variable('cache', COUNT, lambda: jnp.full(rows, tokens, jnp.int32))
    self._index_B, self._count_B = index.value, count.value

  @property
  def has_drafts(self) -> bool:
    """Whether the tokens that do not count are drafts, and no padding: parts of prompts have more.

    A single token of a row is none.
    """
    return self.is_kept and 1 < self._tokens <= MOST_OF_A_STEP

  @property
  def counts_BT(self) -> jax.Array | None:
    """Whether each token counts, [B, T]; None: all do."""
    if not self.is_kept:
      return None
    return jnp.arange(self._tokens) < self._count_B[:, None]

  def before(self, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array | None:
    """Returns an array [B, …] as it was after the tokens before, 0 where there are none.

    None stands for an array of zeros.
    """
    if self._is_first:
      return None
    state: jax.Array = self._module.get_variable('cache', name + STATE)
    is_new_B = (self._index_B == 0).reshape(-1, *[1] * len(shape))
    return jnp.where(is_new_B, 0, state).astype(dtype)

  def keep(self, name: str, state: jax.Array) -> None:
    """Keeps an array [B, …]."""
    if self.is_kept:
      variable = self._module.variable('cache', name + STATE, lambda: state)
      variable.value = state.astype(variable.value.dtype)

  def latest(self, x: jax.Array, number: int) -> jax.Array:
    """Returns the latest tokens that count of [B, number + T, …], whose first ones are from before.

    Returns:
      [B, number, …].
    """
    if not self.is_kept:
      return x[:, -number:]
    at_BS = self._count_B[:, None] + jnp.arange(number)
    return jnp.take_along_axis(x, at_BS.reshape(*at_BS.shape, *[1] * (x.ndim - 2)), 1)
