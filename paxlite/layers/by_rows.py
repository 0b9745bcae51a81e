"""Functions of rows whose vmap computes the rows of all calls in one call."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def by_rows(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """`function` of arrays with rows as their first dimension, each row by itself.

  JAX's own vmap of cuDNN's attention refuses a mask that all heads share. In a pipeline, stages
  are one more dimension; here they become rows.

  Args:
    function: It is called with arrays [B, …] and returns an array [B, …]. Its gradient is taken for
      arrays of floating numbers. In the backward pass the function is computed again.
  """
  forward = _folded(function)

  def gradients(grad: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in arrays]

    def of_floats(*floats: jax.Array) -> jax.Array:
      given = iter(floats)
      return function(*(next(given) if f else a for f, a in zip(is_float, arrays, strict=True)))

    _, vjp = jax.vjp(of_floats, *(a for f, a in zip(is_float, arrays, strict=True) if f))
    return vjp(grad)

  backward = _folded(gradients)

  def all_gradients(arrays: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
    found = iter(backward(grad, *arrays))
    is_float = (jnp.issubdtype(a.dtype, jnp.floating) for a in arrays)
    return tuple(next(found) if f else None for f in is_float)

  with_gradient = jax.custom_vjp(lambda *arrays: forward(*arrays))
  with_gradient.defvjp(lambda *arrays: (forward(*arrays), arrays), all_gradients)
  return with_gradient


def _folded(function: Callable) -> Callable:
  """`function` with a vmap that makes rows of the new dimension."""
  folded = jax.custom_batching.custom_vmap(function)

  @folded.def_vmap
  def vmap(size: int, is_mapped: list[bool], *arrays: jax.Array) -> tuple:
    spread = [
      a if mapped else jnp.broadcast_to(a, (size, *a.shape))
      for a, mapped in zip(arrays, is_mapped, strict=True)
    ]
    results = folded(*(a.reshape(-1, *a.shape[2:]) for a in spread))
    unfolded = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), results)
    return unfolded, jax.tree.map(lambda _: True, unfolded)

  return folded
