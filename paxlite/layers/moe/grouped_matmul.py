"""The list of kernels that multiply rows by the matrix of their group.

Each is a module or an object with the names of GroupedKernel, and the first one that does not
refuse a product computes it.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape
from paxlite.layers.moe import blocked_matmul, megablox_matmul
from paxlite.parallel.partitioning import active_platform


class GroupedKernel(Protocol):
  """Multiplies rows by the matrix of their group."""

  @property
  def ROWS(self) -> int:
    """The number that must divide the number of rows of each group."""

  @property
  def CALLS(self) -> Sequence[str]:
    """The names of its primitive and of the target of its calls in a compiled program."""

  def refusal(self, w_EDF: ArrayOrShape, platform: str, num_choices: int) -> str | None:
    """Returns why the kernel does not multiply by these matrices; None if it does.

    Args:
      w_EDF: A matrix for each group.
      platform: The name of the platform in JAX.
      num_choices: The rows without those that fill up groups.
    """

  def product(self, x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See grouped_matmul."""


class _RaggedDot:
  ROWS = 1
  CALLS = ()

  def refusal(self, w_EDF: ArrayOrShape, platform: str, num_choices: int) -> str | None:
    del w_EDF, platform, num_choices
    return None

  def product(self, x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E.astype(jnp.int32))


_kernels: list[GroupedKernel] = [blocked_matmul, megablox_matmul, _RaggedDot()]


def register(kernel: GroupedKernel) -> None:
  """Puts a kernel in front of all others, for each product that is traced from now on."""
  _kernels.insert(0, kernel)


def first(w_EDF: ArrayOrShape, num_choices: int) -> GroupedKernel:
  """Returns the kernel that multiplies by these matrices on the active platform."""
  case = w_EDF, active_platform(), num_choices
  return next(kernel for kernel in _kernels if kernel.refusal(*case) is None)


def is_call(name: str) -> bool:
  """Returns whether a primitive or the target of a call may be a kernel's."""
  return any(name in kernel.CALLS for kernel in _kernels)


def alignment(w_EDF: jax.Array, num_choices: int) -> int:
  """Returns the number that must divide the number of rows of each group."""
  return first(w_EDF, num_choices).ROWS


def grouped_matmul(
  x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, num_choices: int
) -> jax.Array:
  """Returns y[p] = x[p]·w[e], [P, F], where e is the group of row p.

  Args:
    x_PD: Rows, sorted by group; P is a multiple of the alignment.
    w_EDF: A matrix for each group.
    sizes_E: The number of rows of each group, multiples of the alignment. What rows after their
      sum give is undefined, also in the gradient.
    num_choices: The rows without those that fill up groups.
  """
  return first(w_EDF, num_choices).product(x_PD, w_EDF, sizes_E)
