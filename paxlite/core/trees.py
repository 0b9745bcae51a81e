"""Types of arrays and of trees of arrays."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
  import jax

# Nested dicts, tuples, lists and dataclasses, as jax.tree walks them. JAX has no type for them. The
# leaves are arrays, or in their place shapes, shardings or boxes of Flax.
PyTree = Any
ArrayOrShape: TypeAlias = 'jax.Array | jax.ShapeDtypeStruct'
