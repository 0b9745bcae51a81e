"""Functions of sequences with a vmap that merges all mapped calls into one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def with_folded_vmap(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns `function` with a vmap that makes the mapped dimension a part of the rows.

  JAX's own vmap of cuDNN's attention refuses a mask that all heads share. In a pipeline, the mapped
  dimension is that of the stages.

  Args:
    function: Takes arrays [B, …] and returns an array [B, …]; each row is computed by itself. Only
      floating-point arrays have gradients. The backward pass computes the function again.
  """
  forward = folded(function)

  def gradients(grad: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in arrays]

    def of_floats(*floats: jax.Array) -> jax.Array:
      given = iter(floats)
      return function(*(next(given) if f else a for f, a in zip(is_float, arrays, strict=True)))

    _, vjp = jax.vjp(of_floats, *(a for f, a in zip(is_float, arrays, strict=True) if f))
    return vjp(grad)

  backward = folded(gradients)

  def all_gradients(arrays: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
    found = iter(backward(grad, *arrays))
    is_float = (jnp.issubdtype(a.dtype, jnp.floating) for a in arrays)
    return tuple(next(found) if f else None for f in is_float)

  with_gradient = jax.custom_vjp(lambda *arrays: forward(*arrays))
  with_gradient.defvjp(lambda *arrays: (forward(*arrays), arrays), all_gradients)
  return with_gradient


def folded(function: Callable) -> Callable:
  """Returns `function` without a derivative, and with the vmap of `with_folded_vmap`."""
  of_rows = jax.custom_batching.custom_vmap(function)

  @of_rows.def_vmap
  def vmap(size: int, is_mapped: list[bool], *arrays: jax.Array) -> tuple:
    spread = [
      a if mapped else jnp.broadcast_to(a, (size, *a.shape))
      for a, mapped in zip(arrays, is_mapped, strict=True)
    ]
    results = of_rows(*(a.reshape(-1, *a.shape[2:]) for a in spread))
    unfolded = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), results)
    return unfolded, jax.tree.map(lambda _: True, unfolded)

  return of_rows
