"""The elementwise functions that make hidden units."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxlite.parallel.partitioning import active_platform


def gelu(x: jax.Array) -> jax.Array:
  """GELU by the approximation x/2 · (1 + tanh(u)) with u = √(2/π) · (x + 0.044715 x³).

  On GPUs it is computed as x · sigmoid(2u), which is the same. XLA writes a tanh to memory if the
  backward pass uses it too, and computes a sigmoid again.
  """
  if active_platform() not in ('gpu', 'cuda'):
    return jax.nn.gelu(x, approximate=True)
  return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x * (1 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': gelu, 'gelu_exact': functools.partial(jax.nn.gelu, approximate=False),
  'relu': jax.nn.relu, 'relu2': lambda x: jnp.square(jax.nn.relu(x)), 'silu': jax.nn.silu,
}  # fmt: skip


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """gpt-oss' gate · sigmoid(1.702 · gate) · (up + 1), with both arguments limited to 7."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def gate_by(activation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the function (gate, up) → activation(gate) · up, or another one of that name."""
  if activation == 'clamped_swiglu':
    return _clamped_swiglu
  return lambda gate, up: ACTIVATIONS[activation](gate) * up
