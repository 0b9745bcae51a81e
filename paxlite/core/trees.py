"""Types of arrays and of trees of arrays."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax

# Nested dicts, tuples, lists and dataclasses, as jax.tree walks them. JAX has no type for them. The
# leaves are arrays, or in their place shapes, shardings or boxes of Flax.
PyTree = Any
type ArrayOrShape = 'jax.Array | jax.ShapeDtypeStruct'
