"""The keys and values that a model keeps of the tokens of each row.

The cache is a flat dictionary of arrays, […, S, H], with S slots for the tokens of a row. Layers
that are repeated by a scan have an axis for the layers before that of the rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REPEATED
from paxlite.parallel import partitioning

Path = tuple[str, ...]
Cache = dict[Path, jax.Array]


class CacheLayout:
  """What the cache of a model looks like.

  Args:
    variables: The shapes of the model's collection 'cache' for rows of one token.
    mesh: The mesh over whose devices rows and heads are split; None: one device.
    rules: The mapping from logical axes to mesh axes.
  """

  def __init__(self, variables: PyTree, mesh: Mesh | None, rules: partitioning.Rules):
    flat = flatten_dict(variables)
    self._index = {path: x for path, x in flat.items() if path[-1] == 'index'}
    self._arrays = {path: x for path, x in flat.items() if path[-1] != 'index'}
    self._mesh, self._rules = mesh, rules

  def empty(self, rows: int, slots: int) -> Cache:
    """Returns a cache without tokens."""

    def zeros() -> Cache:
      shapes = {path: _shape(path, x, rows, slots) for path, x in self._arrays.items()}
      return {path: jnp.zeros(shape, self._arrays[path].dtype) for path, shape in shapes.items()}

    return jax.jit(zeros, out_shardings=self.shardings(rows))()

  def abstract(self, rows: int, slots: int) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns the shapes of such a cache."""
    shardings = self.shardings(rows)
    shapes = {path: _shape(path, x, rows, slots) for path, x in self._arrays.items()}
    return {
      path: jax.ShapeDtypeStruct(
        shape, self._arrays[path].dtype, sharding=None if shardings is None else shardings[path]
      )
      for path, shape in shapes.items()
    }

  def shardings(self, rows: int) -> Any:
    """Returns the sharding of each array, for the outputs of programs; None without a mesh."""
    if self._mesh is None:
      return None
    found = {}
    for path, x in self._arrays.items():
      axis = _row_axis(path)
      names: list[str | None] = [None] * x.ndim
      names[axis] = 'batch'
      if x.ndim - axis == 4:
        names[axis + 1] = 'act_kv_heads'
      spec = partitioning.spec(names, self._rules)
      fit = partitioning.fitting(spec, _shape(path, x, rows, 1), dict(self._mesh.shape))
      found[path] = NamedSharding(self._mesh, fit)
    return found

  @property
  def everywhere(self) -> NamedSharding | None:
    """The sharding of an array of which each device has a copy; None without a mesh."""
    return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

  def variables(self, cache: Cache, length_B: jax.Array) -> PyTree:
    """Returns the collection of the model, whose rows have so many tokens."""
    index = {k: jnp.broadcast_to(length_B, (*x.shape[:-1], len(length_B))) for k, x in
             self._index.items()}  # fmt: skip
    return unflatten_dict(cache | index)

  def of(self, variables: PyTree) -> Cache:
    """Returns the cache in what a model returns."""
    return {path: x for path, x in flatten_dict(variables).items() if path in self._arrays}


def taken(cache: Cache, row_R: jax.Array) -> Cache:
  """Returns some rows; one row may be taken several times."""
  return _mapped(lambda axis, x: jnp.take(x, row_R, axis, mode='clip'), cache)


def put(cache: Cache, rows: Cache, row_R: jax.Array) -> Cache:
  """Returns the cache with other rows; those whose number is none are dropped.

  If `rows` have fewer slots, the rest keeps what it holds.
  """

  def one(path: Path, x: jax.Array) -> jax.Array:
    new = rows[path]
    at: tuple[Any, ...] = (slice(None),) * _row_axis(path) + (row_R,)
    if new.shape[-2] < x.shape[-2]:
      at += (slice(None),) * (x.ndim - len(at) - 2) + (slice(0, new.shape[-2]),)
    return x.at[at].set(new, mode='drop')

  return {path: one(path, x) for path, x in cache.items()}


def resized(cache: Cache, row_R: jax.Array, slots: int) -> Cache:
  """Returns these rows with so many slots each."""

  def one(axis: int, x: jax.Array) -> jax.Array:
    x = x[..., :slots, :]
    x = jnp.take(x, row_R, axis, mode='clip')
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, slots - x.shape[-2]), (0, 0)])

  return _mapped(one, cache)


def _shape(path: Path, x: jax.ShapeDtypeStruct, rows: int, slots: int) -> list[int]:
  shape = [*x.shape[:-2], slots, x.shape[-1]]
  shape[_row_axis(path)] = rows
  return shape


def _mapped(function: Callable[[int, jax.Array], jax.Array], cache: Cache) -> Cache:
  return {path: function(_row_axis(path), x) for path, x in cache.items()}


def _row_axis(path: Path) -> int:
  return 1 if REPEATED in path else 0
