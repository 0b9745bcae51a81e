"""The cached keys and values of each row's tokens.

The cache is a flat dictionary of arrays, […, S, H], with S slots for the tokens of a row; arrays
of 8 bits have scales too, […, S]. Layers without keys have states instead, whose size does not
depend on the tokens. Layers that are repeated by a scan have an axis for the layers before that of
the rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import COUNT, INDEX, REPEATED, SCALE, STATE
from paxlite.layers.attention.cache_encoding import slot_axis
from paxlite.parallel import partitioning

Path = tuple[str, ...]
Cache = dict[Path, jax.Array]


class CacheLayout:
  """The layout of a model's cache.

  Args:
    variables: The shapes of the model's collection 'cache' for rows of one token.
    mesh: The mesh over whose devices rows and heads are split; None: one device.
    rules: The mapping from logical axes to mesh axes.
    dtype: What encodes its keys and values; see cache_encoding.
  """

  def __init__(
    self,
    variables: PyTree,
    mesh: Mesh | None,
    rules: partitioning.Rules,
    dtype: str | None = None,
  ):
    flat = flatten_dict(variables)
    of_name = lambda name: {path: x for path, x in flat.items() if path[-1] == name}
    self._index, self._count = of_name(INDEX), of_name(COUNT)
    self._arrays = {k: x for k, x in flat.items() if k not in {**self._index, **self._count}}
    self._mesh, self._rules, self.dtype = mesh, rules, dtype
    self._empty: dict[tuple[int, int], Callable[[], Cache]] = {}  # compiled

  def empty(self, rows: int, slots: int) -> Cache:
    """Returns a cache without tokens."""

    def zeros() -> Cache:
      shapes = {path: _shape(path, x, rows, slots) for path, x in self._arrays.items()}
      return {path: jnp.zeros(shape, self._arrays[path].dtype) for path, shape in shapes.items()}

    if (rows, slots) not in self._empty:
      self._empty[rows, slots] = jax.jit(zeros, out_shardings=self.shardings(rows))
    return self._empty[rows, slots]()

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
      is_scale = path[-1].endswith(SCALE)  # [B, N, S]
      if x.ndim - axis == 4 or is_scale:  # [B, N, S, H], or of a convolution [B, tokens, N, H]
        is_whole = path[-1] == 'heads' + STATE or not _is_state(path)
        names[axis + (1 if is_whole else 2)] = 'act_kv_heads'
      spec = partitioning.spec(names, self._rules)
      fit = partitioning.fitting(spec, _shape(path, x, rows, 1), dict(self._mesh.shape))
      found[path] = NamedSharding(self._mesh, fit)
    return found

  @property
  def everywhere(self) -> NamedSharding | None:
    """The sharding of an array of which each device has a copy; None without a mesh."""
    return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

  @property
  def has_states(self) -> bool:
    """Whether some layers have states, which cannot drop their last tokens."""
    return any(_is_state(path) for path in self._arrays)

  @property
  def not_encoded(self) -> str:
    """Names of arrays for tokens that are not in 8 bits; '' if there are none."""
    plain = {p for p in self._arrays if not (_is_state(p) or p[-1].endswith(SCALE))}
    scaled = {path for path in plain if (*path[:-1], path[-1] + SCALE) in self._arrays}
    if not plain:
      return 'no keys'
    return ', '.join(sorted({path[-1] for path in plain - scaled}))

  def variables(self, cache: Cache, length_B: jax.Array, count_B: jax.Array) -> PyTree:
    """Returns the collection of the model.

    Args:
      length_B: How many tokens of each row are in it.
      count_B: How many tokens of a call, the first ones of each row, are put in; what comes behind
        them has no meaning.
    """
    index = {path: _of_layers(length_B, x) for path, x in self._index.items()}
    return unflatten_dict(cache | index | self._counts(count_B))

  def first_variables(self, count_B: jax.Array) -> PyTree:
    """Returns the collection where all rows have no tokens so far, which makes the arrays."""
    return unflatten_dict(self._counts(count_B))

  def _counts(self, count_B: jax.Array) -> Cache:
    return {path: _of_layers(count_B, x) for path, x in self._count.items()}

  def of(self, variables: PyTree) -> Cache:
    """Returns the cache in what a model returns."""
    return {path: x for path, x in flatten_dict(variables).items() if path in self._arrays}


def taken(cache: Cache, row_R: jax.Array) -> Cache:
  """Returns some rows; one row may be taken several times."""
  return {path: jnp.take(x, row_R, _row_axis(path), mode='clip') for path, x in cache.items()}


def put(cache: Cache, rows: Cache, row_R: jax.Array) -> Cache:
  """Reorders the rows of the cache; rows without a number are dropped.

  If `rows` have fewer slots, the rest keeps what it holds.
  """

  def one(path: Path, x: jax.Array) -> jax.Array:
    new = rows[path].astype(x.dtype)
    at: tuple[Any, ...] = (slice(None),) * _row_axis(path) + (row_R,)
    axis = slot_axis(path[-1])
    if not _is_state(path) and new.shape[axis] < x.shape[axis]:
      at += (slice(None),) * (x.ndim + axis - len(at)) + (slice(0, new.shape[axis]),)
    return x.at[at].set(new, mode='drop')

  return {path: one(path, x) for path, x in cache.items()}


def resized(cache: Cache, row_R: jax.Array, slots: int) -> Cache:
  """Returns these rows with `slots` slots each."""

  def one(path: Path, x: jax.Array) -> jax.Array:
    axis = slot_axis(path[-1])
    if not _is_state(path):
      x = jax.lax.slice_in_dim(x, 0, min(slots, x.shape[axis]), axis=axis)
    x = jnp.take(x, row_R, _row_axis(path), mode='clip')
    if _is_state(path):
      return x
    more = [(0, 0)] * x.ndim
    more[axis] = 0, slots - x.shape[axis]
    return jnp.pad(x, more)

  return {path: one(path, x) for path, x in cache.items()}


def _shape(path: Path, x: jax.ShapeDtypeStruct, rows: int, slots: int) -> list[int]:
  shape = [*x.shape]
  if not _is_state(path):
    shape[slot_axis(path[-1])] = slots
  shape[_row_axis(path)] = rows
  return shape


def _is_state(path: Path) -> bool:
  return path[-1].endswith(STATE)


def _of_layers(numbers_B: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns numbers of the rows, for each of the layers that are repeated."""
  return jnp.broadcast_to(numbers_B, (*like.shape[:-1], len(numbers_B)))


def _row_axis(path: Path) -> int:
  return 1 if REPEATED in path else 0
