"""Where two train states differ, array by array and bit for bit."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.proof.shard_sums import bits


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
  """How an array of one state differs from the same array of another."""

  name: str  # the name of the array in the state, as params/embedding/emb_var
  numbers: int  # how many numbers it has
  differing: int  # how many of them differ in any bit
  # the largest difference of two numbers, over the largest absolute number; inf or NaN where a
  # number is not finite
  largest: float

  @property
  def rank(self) -> float:
    """How large the difference is, for an order by it; arrays that are not finite come first."""
    return self.largest if math.isfinite(self.largest) else math.inf

  def __str__(self) -> str:
    return (
      f'{self.name}: {self.differing:,} of {self.numbers:,} numbers differ, by up to '
      f'{self.largest:.1e} of the largest number'
    )


def differences(one: PyTree, other: PyTree) -> Iterator[ArrayDifference]:
  """Yields the arrays that differ in any bit.

  Args:
    one: A tree of arrays.
    other: A tree of the same structure, shapes, dtypes and shardings.
  """
  leaves = jax.tree_util.tree_leaves_with_path(one)
  for (path, x), y in zip(leaves, jax.tree.leaves(other), strict=True):
    differing, largest = _compared(x, y)
    if int(differing):
      yield ArrayDifference(path_name(path), x.size, int(differing), float(largest))


@functools.partial(jax.jit, inline=True)
def _compared(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns how many numbers differ in a bit, and their largest relative difference."""
  # a narrow sum would overflow, and x64 is off
  differing = (bits(x) != bits(y)).astype(jnp.uint32).sum()
  wide = lambda a: a.astype(jnp.float32)
  largest = jnp.abs(wide(x) - wide(y)).max(initial=0)
  return differing, largest / jnp.maximum(jnp.abs(wide(y)).max(initial=0), 1e-30)
