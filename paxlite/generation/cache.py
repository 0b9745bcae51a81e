"""The cached keys and values of each row's tokens.

The cache is a flat dictionary of arrays, […, S, H], with S slots for the tokens of a row; arrays
of 8 bits have scales too, […, S]. Layers without keys have states instead, whose size does not
depend on the tokens. Layers that are repeated by a scan have an axis for the layers before that of
the rows.

Rows may share pages: then the arrays of tokens have the axes of the pages and of the tokens in a
page in the place of those of the rows and of their slots, and the dictionary has a table of the
pages of each row; see PagedVectors.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import COUNT, INDEX, PAGES, REPEATED, SCALE, STATE
from paxlite.layers.attention.cache_encoding import slot_axis
from paxlite.layers.attention.paged_vectors import NO_PAGE
from paxlite.parallel import partitioning

Path = tuple[str, ...]
Cache = dict[Path, jax.Array]
TABLE = (PAGES,)  # the path of the pages of each row, [B, W]


@dataclasses.dataclass(frozen=True)
class Pages:
  """The pages that the rows of a cache share."""

  count: int  # how many there are, P
  # The tokens of a page. In rows of 16 to 4,096 tokens, pages of 64 waste 2 to 4 %; smaller ones
  # would be read in smaller pieces.
  size: int = 64

  @classmethod
  def of(cls, tokens: int) -> 'Pages':
    """Returns pages for so many tokens."""
    return cls(-(-tokens // cls.size))


class CacheLayout:
  """The layout of a model's cache.

  Args:
    variables: The shapes of the model's collection 'cache' for rows of one token.
    mesh: The mesh over whose devices rows and heads are split; None: one device.
    rules: The mapping from logical axes to mesh axes.
    dtype: What encodes its keys and values; see cache_encoding.
    pages: The pages of the rows' tokens; None: each row has slots of its own.
  """

  def __init__(
    self,
    variables: PyTree,
    mesh: Mesh | None,
    rules: partitioning.Rules,
    dtype: str | None = None,
    pages: Pages | None = None,
  ):
    flat = flatten_dict(variables)
    of_name = lambda name: {path: x for path, x in flat.items() if path[-1] == name}
    self._index, self._count = of_name(INDEX), of_name(COUNT)
    self._arrays = {k: x for k, x in flat.items() if k not in {**self._index, **self._count}}
    self._mesh, self._rules, self.dtype, self.pages = mesh, rules, dtype, pages
    self._empty: dict[tuple[int, int], Callable[[], Cache]] = {}  # compiled

  def empty(self, rows: int, slots: int) -> Cache:
    """Returns a cache without tokens."""

    def zeros() -> Cache:
      cache = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items() if path != TABLE}
      if self.pages is not None:
        cache[TABLE] = jnp.full(shapes[TABLE].shape, NO_PAGE, jnp.int32)
      return cache

    shapes = self.abstract(rows, slots)

    if (rows, slots) not in self._empty:
      self._empty[rows, slots] = jax.jit(zeros, out_shardings=self.shardings(rows))
    return self._empty[rows, slots]()

  def abstract(self, rows: int, slots: int) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns the shapes of such a cache."""
    shardings = self.shardings(rows)
    shapes = {path: self._shape(path, rows, slots) for path in self._arrays}
    dtypes = {path: x.dtype for path, x in self._arrays.items()}
    if self.pages is not None:
      shapes[TABLE], dtypes[TABLE] = [rows, -(-slots // self.pages.size)], jnp.dtype('int32')
    return {
      path: jax.ShapeDtypeStruct(
        shape, dtypes[path], sharding=None if shardings is None else shardings[path]
      )
      for path, shape in shapes.items()
    }

  def bytes_of_slots(self, rows: int, slots: int) -> int:
    """Returns the size of a cache in which each row has slots of its own."""
    size = lambda path, x: math.prod(_shape(path, x, rows, slots)) * x.dtype.itemsize
    return sum(size(*pair) for pair in self._arrays.items())

  def is_shared(self, path: Path) -> bool:
    """Whether an array consists of pages that rows share."""
    return self.pages is not None and path != TABLE and not _is_state(path)

  def _shape(self, path: Path, rows: int, slots: int) -> list[int]:
    if self.is_shared(path):
      assert self.pages is not None
      rows, slots = self.pages.count + 1, self.pages.size  # the last page belongs to no row
    return _shape(path, self._arrays[path], rows, slots)

  def shardings(self, rows: int) -> Any:
    """Returns the sharding of each array, for the outputs of programs; None without a mesh."""
    if self._mesh is None:
      return None
    found: dict[Path, Any] = {}
    for path, x in self._arrays.items():
      axis = _row_axis(path)
      names: list[str | None] = [None] * x.ndim
      names[axis] = None if self.is_shared(path) else 'batch'
      is_scale = path[-1].endswith(SCALE)  # [B, N, S]
      if x.ndim - axis == 4 or is_scale:  # [B, N, S, H], or of a convolution [B, tokens, N, H]
        is_whole = path[-1] == 'heads' + STATE or not _is_state(path)
        names[axis + (1 if is_whole else 2)] = 'act_kv_heads'
      spec = partitioning.spec(names, self._rules)
      fit = partitioning.fitting(spec, _shape(path, x, rows, 1), dict(self._mesh.shape))
      found[path] = NamedSharding(self._mesh, fit)
    if self.pages is not None:
      found[TABLE] = self.everywhere
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
  def has_tokens(self) -> bool:
    """Whether some layers keep arrays with slots for tokens."""
    return any(not _is_state(path) for path in self._arrays)

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
    tables = {}
    if self.pages is not None:
      of_layer = lambda path: (*path[:-1], PAGES)
      tables = {of_layer(path): _of_layers(cache[TABLE], x) for path, x in self._index.items()}
      cache = {path: x for path, x in cache.items() if path != TABLE}
    return unflatten_dict(cache | index | tables | self._counts(count_B))

  def first_variables(self, count_B: jax.Array) -> PyTree:
    """Returns the collection where all rows have no tokens so far, which makes the arrays."""
    return unflatten_dict(self._counts(count_B))

  def _counts(self, count_B: jax.Array) -> Cache:
    return {path: _of_layers(count_B, x) for path, x in self._count.items()}

  def of(self, variables: PyTree) -> Cache:
    """Returns the cache in what a model returns."""
    flat = flatten_dict(variables)
    found = {path: x for path, x in flat.items() if path in self._arrays}
    if self.pages is not None:
      path, like = next(iter(self._index.items()))
      found[TABLE] = flat[*path[:-1], PAGES][(0,) * (like.ndim - 1)]
    return found


def taken(cache: Cache, row_R: jax.Array, length_R: jax.Array) -> Cache:
  """Returns the first tokens of some rows, with 0 behind them.

  What a row held before may be NaN, which must not reach another request.

  Args:
    cache: The cache.
    row_R: The rows, of which one may be taken several times; one that does not exist has no pages.
    length_R: How many tokens are taken.
  """

  def one(path: Path, x: jax.Array) -> jax.Array:
    if path == TABLE:
      return jnp.take(x, row_R, 0, mode='fill', fill_value=NO_PAGE)
    if _is_shared(path, cache):
      return x
    x = jnp.take(x, row_R, _row_axis(path), mode='clip')
    return x if _is_state(path) else _first(path, x, length_R)

  return {path: one(path, x) for path, x in cache.items()}


def put(cache: Cache, rows: Cache, row_R: jax.Array) -> Cache:
  """Reorders the rows of the cache; rows without a number are dropped.

  If `rows` have fewer slots, the others get 0.
  """

  def one(path: Path, x: jax.Array) -> jax.Array:
    if path == TABLE:
      return x
    new = rows[path].astype(x.dtype)
    if _is_shared(path, cache):
      return new
    at: tuple[Any, ...] = (slice(None),) * _row_axis(path) + (row_R,)
    if not _is_state(path):
      axis, more = slot_axis(path[-1]), [(0, 0)] * x.ndim
      more[axis] = 0, x.shape[axis] - new.shape[axis]
      new = jnp.pad(new, more)
    return x.at[at].set(new, mode='drop')

  return {path: one(path, x) for path, x in cache.items()}


def row_of(cache: Cache, row_1: jax.Array, page_W: jax.Array) -> Cache:
  """Returns a copy of what a row holds: these pages of the arrays that rows share."""

  def one(path: Path, x: jax.Array) -> jax.Array:
    return jnp.take(x, page_W if _is_shared(path, cache) else row_1, _row_axis(path), mode='clip')

  return {path: one(path, x) for path, x in cache.items() if path != TABLE}


def with_row(cache: Cache, row: Cache, row_1: jax.Array, page_W: jax.Array) -> Cache:
  """Returns the cache with such a copy in a row and in pages; NO_PAGE leaves one out."""

  def one(path: Path, x: jax.Array) -> jax.Array:
    at = page_W if _is_shared(path, cache) else row_1
    before: tuple[Any, ...] = (slice(None),) * _row_axis(path)
    return cache[path].at[*before, at].set(x, mode='drop')

  return cache | {path: one(path, x) for path, x in row.items()}


def resized(cache: Cache, row_R: jax.Array, slots: int) -> Cache:
  """Returns these rows with `slots` slots each; they share no pages."""

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


def _first(path: Path, x: jax.Array, length_R: jax.Array) -> jax.Array:
  """Returns the first tokens of rows, with 0 behind them."""
  axis, row_axis = slot_axis(path[-1]), _row_axis(path)
  shape = [1] * x.ndim
  shape[row_axis] = len(length_R)
  is_token = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis) < length_R.reshape(shape)
  return jnp.where(is_token, x, jnp.zeros_like(x))


def _is_shared(path: Path, cache: Cache) -> bool:
  """Whether an array of this cache consists of pages that rows share."""
  return TABLE in cache and path != TABLE and not _is_state(path)


def _is_state(path: Path) -> bool:
  return path[-1].endswith(STATE)


def _of_layers(of_rows: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns what rows have, [B, …], for each of the layers that are repeated."""
  return jnp.broadcast_to(of_rows, (*like.shape[:-1], *of_rows.shape))


def _row_axis(path: Path) -> int:
  return 1 if REPEATED in path else 0
