"""How an optimizer's moments are stored between two updates: their dtype, on a device or its host.

Moments are the floating-point arrays of a state that have at least one dimension.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REPEATED, path_name
from paxlite.optim.state_axes import is_box
from paxlite.parallel.partitioning import shards_of


def is_moment(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
  """Whether an array of an optimizer's state, or its shape, is a moment."""
  return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def narrow(
  transformation: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
  """Keeps the moments in a narrower dtype. Updates are computed in float32.

  Moments are rounded stochastically: up or down with probabilities that make the mean of the result
  equal to the moment. Rounding to the nearest would lose every change below half a unit of the last
  place, which is 0.2 % in bfloat16: with a decay of 0.999, a second moment would never shrink.

  Args:
    transformation: A transformation whose state has a `count` of updates.
    dtype: bfloat16; with float32 nothing changes.
  """
  dtype = jnp.dtype(dtype)
  if dtype == jnp.float32:
    return optax.with_extra_args_support(transformation)

  def init(params: PyTree) -> PyTree:
    state = transformation.init(params)
    check_moments(state, params, dtype.name)
    one = lambda path, x: x.astype(dtype) if is_narrowed(path, x) else x
    return jax.tree_util.tree_map_with_path(one, state)

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: object
  ) -> tuple[PyTree, PyTree]:
    wide = jax.tree_util.tree_map_with_path(
      lambda path, x: x.astype(jnp.float32) if is_narrowed(path, x) else x, state
    )
    updates, wide = transformation.update(updates, wide, params, **extra)
    counts = optax.tree.get_all_with_path(state, 'count')
    key = jax.random.fold_in(jax.random.key(0), counts[0][1])

    def rounded(path: KeyPath, x: jax.Array) -> jax.Array:
      name = path_name(path)
      if not is_narrowed(path, x):
        return x
      # layers of a repeated stack share their draws, so that they can be updated one by one
      shape = x.shape[1:] if is_repeated(name) else x.shape
      bits = jax.random.bits(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, jnp.uint16)
      return stochastically_rounded(x.astype(jnp.float32), bits)

    return updates, jax.tree_util.tree_map_with_path(rounded, wide)

  return optax.GradientTransformationExtraArgs(init, update)


# names of moments in states of this folder and of optax; others may be parameters
_NAMES = {
  'm', 'v', 'mu', 'nu', 'nu_max', 'trace', 'sum_of_squares', 'm1', 'm2', 'e_g', 'e_x', 'momentum',
}  # fmt: skip


def is_narrowed(path: KeyPath, x: jax.Array) -> bool:
  """Whether `narrow` keeps an array of a state in its dtype: a mean of gradients, by its name."""
  fields = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
  return is_moment(x) and bool(fields) and fields[-1] in _NAMES


def check_moments(state: PyTree, params: PyTree, dtype: str) -> None:
  """Raises UserError if a state holds other arrays like parameters, or does not count updates."""
  way_out = "ADAM_MOMENTS_DTYPE=float32, or an argument of the optimizer's own (mu_dtype)"
  shapes = {x.shape for x in jax.tree.leaves(params) if x.ndim}
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    # NorMuon's means of neurons, and SOAP's matrices: float32
    is_small = any(getattr(k, 'name', None) in ('neurons', 'products', 'bases') for k in path)
    if is_moment(x) and x.shape in shapes and not is_narrowed(path, x) and not is_small:
      raise UserError(
        f'ADAM_MOMENTS_DTYPE={dtype}: {path_name(path)} of the optimizer may not be a moment, so '
        f'it must not be rounded: {way_out}'
      )
  if not optax.tree.get_all_with_path(state, 'count'):
    raise UserError(
      f'ADAM_MOMENTS_DTYPE={dtype} needs an optimizer that counts updates in its state: {way_out}'
    )


def stochastically_rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
  """Returns float32 values as bfloat16, rounded up or down by random bits.

  A value that bfloat16 can hold is never changed: the bits are added below its last place.

  Args:
    x: float32 values.
    bits: Independent uniform uint16 values, of a shape that broadcasts to that of x.
  """
  raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
  kept = raised & jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)


def streamed(
  update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
  grads: PyTree,
  state: PyTree,
  params: PyTree,
) -> tuple[PyTree, PyTree]:
  """Updates parameters with moments that are in the memory of the host, and stay there.

  The layers of a repeated stack are updated one after the other, so that a device holds the moments
  of one layer at a time. Variables outside of the stack are updated as a whole.

  Args:
    update: Returns the next parameters and the next state, from (grads, state, params).
    grads: The gradients.
    state: The optimizer's state, whose moments are on the host.
    params: The parameters.

  Returns:
    The next parameters, and the next state with its moments on the host.
  """

  update_here = functools.partial(fetched, update)
  rest = update_here(
    *(selected(t, lambda name, _: not is_repeated(name)) for t in (grads, state, params))
  )
  stacked = tuple(selected(t, lambda name, _: is_repeated(name)) for t in (params, state))
  layers = jax.tree.leaves(stacked[0])
  if not layers:
    return rest
  stacked_grads = selected(grads, lambda name, _: is_repeated(name))
  counts = selected(state, lambda _, x: not is_moment(x))

  def layer(i: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    at = lambda x: jax.lax.dynamic_index_in_dim(_by_stage(x), i, 1, keepdims=False)
    grads, (params, state) = jax.tree.map(at, (stacked_grads, carry))
    params, state = update_here(grads, merged(state, counts), params)
    new = params, selected(state, lambda name, _: is_repeated(name))
    return jax.tree.map(lambda stack, x: _put(stack, x, i), carry, new)

  num_layers = layers[0].shape[0] // _num_stages(layers[0])
  stacked = jax.lax.fori_loop(0, num_layers, layer, stacked)
  return merged(stacked[0], rest[0]), merged(stacked[1], rest[1])


def fetched(
  update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
  grads: PyTree,
  state: PyTree,
  params: PyTree,
) -> tuple[PyTree, PyTree]:
  """Updates parameters as a whole with moments that are on the host; see `streamed`."""

  def moved(tree: PyTree, space: Any) -> PyTree:  # JAX has no public type of jax.memory.Space
    return jax.tree.map(lambda x: jax.device_put(x, space) if is_moment(x) else x, tree)

  params, state = update(grads, moved(state, jax.memory.Space.Device), params)
  return params, moved(state, jax.memory.Space.Host)


def is_repeated(name: str) -> bool:
  """Whether a variable of this name has the layers of a repeated stack as its first dimension."""
  return REPEATED in name.split('/')


def _num_stages(x: jax.Array) -> int:
  return shards_of('layers', x.shape[0])


def _by_stage(x: jax.Array) -> jax.Array:
  """Returns a stack [L, …] as [Z, L / Z, …]: a slice of a layer of each stage moves nothing."""
  return x.reshape(_num_stages(x), -1, *x.shape[1:])


def _put(stack: jax.Array, layer: jax.Array, i: jax.Array) -> jax.Array:
  """Returns a stack [L, …] with layer i of each stage replaced by [Z, …]."""
  put = jax.lax.dynamic_update_index_in_dim(_by_stage(stack), layer, i, 1)
  return put.reshape(stack.shape)


def selected(tree: PyTree, wanted: Callable[[str, jax.Array], bool]) -> PyTree:
  """Returns `tree`, boxed or not, with None in place of the variables that are not wanted."""
  one = lambda path, x: x if wanted(path_name(path), x) else None
  return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_box)


def merged(tree: PyTree, other: PyTree) -> PyTree:
  """Returns `tree` with the leaves of `other` where it has None."""
  pick = lambda a, b: b if a is None else a
  return jax.tree.map(pick, tree, other, is_leaf=lambda x: x is None)
