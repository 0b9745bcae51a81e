"""Vectors of tokens in pages of a cache that its rows share (https://arxiv.org/abs/2309.06180)."""

import jax
import jax.numpy as jnp
from flax import struct

NO_PAGE = 1 << 30  # in a table: there is no page


@struct.dataclass
class PagedVectors:
  """What a cache holds of each row's tokens; p tokens of a row lie in one page.

  The last page belongs to no row: a kernel that cannot drop the tokens of a row without a page puts
  them there.
  """

  pages: jax.Array  # [P + 1, …, p, H], or scales [P + 1, …, p]
  table: jax.Array  # the pages of each row, [B, W], or NO_PAGE
  length: jax.Array  # how many tokens each row has, [B]
  axis: int = struct.field(pytree_node=False)  # the dimension of p, counted from the end

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of keys or values that have heads, [B, S, K, H]."""
    _, K, p, H = self.pages.shape
    B, W = self.table.shape
    return B, W * p, K, H

  @property
  def dtype(self) -> jnp.dtype:
    return self.pages.dtype

  def appended(self, new: jax.Array) -> jax.Array:
    """Returns the pages with each row's latest tokens, [B, T, …], of which those with a page."""
    axis, T = self.axis, new.shape[1]
    size = self.pages.shape[axis]
    slots_BT = self.length[:, None] - T + jnp.arange(T)
    at_BT = slots_BT // size
    page_BT = jnp.take_along_axis(self.table, at_BT, 1, mode='fill', fill_value=NO_PAGE)
    between = (slice(None),) * (self.pages.ndim + axis - 1)
    return self.pages.at[page_BT, *between, slots_BT % size].set(new, mode='drop')

  def vectors(self) -> jax.Array:
    """Returns a copy, [B, S, …, H], that is 0 where a row has no token.

    A page may still hold the tokens of another row, whose NaN must not reach this one.
    """
    axis = self.axis
    x = jnp.take(self.pages, self.table, 0, mode='fill', fill_value=0)  # [B, W, …, p, H]
    x = jnp.moveaxis(x, 1, axis - 1)
    S = x.shape[axis - 1] * x.shape[axis]
    x = x.reshape(*x.shape[: axis - 1], S, *x.shape[x.ndim + axis + 1 :])
    is_token_BS = jnp.arange(S) < self.length[:, None]
    ones = (1,) * (x.ndim + axis - 1)
    is_token = is_token_BS.reshape(len(self.length), *ones, S, *(1,) * (-axis - 1))
    return jnp.moveaxis(jnp.where(is_token, x, 0), axis, 1)
