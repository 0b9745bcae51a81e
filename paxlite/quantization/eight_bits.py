"""Moments in eight bits: a code for each number, and a scale for each block of numbers.

The codes and the blocks are those of https://arxiv.org/abs/2110.02861, as bitsandbytes has them. A
block is up to 256 numbers in a row of the last dimension.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paxlite.core.trees import PyTree
from paxlite.optim.moments import check_moments, is_narrowed
from paxlite.optim.transformations import Valid

BLOCK = 256
_SMALLEST = 4096  # numbers of an array that is kept in eight bits, as in bitsandbytes
_SHORTEST = 32  # numbers of a block; with fewer of them, the scales would take up what codes save
_DECADES = 7


class EightBits(NamedTuple):
  """A state with 8-bit moments."""

  codes: PyTree  # the state, with uint8 codes [..., n] in place of moments
  # the largest absolute value of each block, [..., n / block], float32; None for arrays that are
  # kept as they are
  scales: PyTree


@functools.cache
def code_values(signed: bool) -> np.ndarray:
  """Returns the values of the 256 codes in rising order, float32.

  Each decade from 10⁻⁷ to 1 has twice as many values as the one below it: the middles of equal
  parts of what is between a tenth of its end and its end. 0 and 1 are values, too.
  """
  found = [0.0, 1.0]
  for decade in range(_DECADES):
    parts = 2**decade if signed else 2 ** (decade + 1)
    ends = np.linspace(0.1, 1, parts + 1, dtype=np.float32).astype(np.float64)
    middles = 10.0 ** (decade + 1 - _DECADES) * (ends[:-1] + ends[1:]) / 2
    found += [*middles, *(-middles if signed else ())]
  return np.sort(np.array(found, np.float32))


def kept_in_eight_bits(
  transformation: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Keeps the moments of a transformation in eight bits. Updates are computed in float32.

  Moments are rounded to the nearest value. Second moments, by their names, have no sign.

  Args:
    transformation: A transformation whose state has a `count` of updates.
  """

  def init(params: PyTree) -> EightBits:
    state = transformation.init(params)
    check_moments(state, params, 'int8')
    return _encoded(state)

  def update(
    updates: PyTree,
    state: PyTree,
    params: PyTree | None = None,
    valid: Valid = True,
    **extra: object,
  ) -> tuple[PyTree, EightBits]:
    wide = _decoded(state)
    updates, new = transformation.update(updates, wide, params, valid=valid, **extra)
    # what was decoded and not changed may round to other codes
    kept = lambda new, old: jnp.where(valid, new, old)
    return updates, jax.tree.map(kept, _encoded(new), state)

  return optax.GradientTransformationExtraArgs(init, update)


def _encoded(state: PyTree) -> EightBits:
  flat = jax.tree_util.tree_leaves_with_path(state)
  pairs = [
    encode(x, _is_signed(path)) if is_narrowed(path, x) and block_of(x.shape) else (x, None)
    for path, x in flat
  ]
  codes, scales = zip(*pairs, strict=True)
  tree = jax.tree.structure(state)
  return EightBits(jax.tree.unflatten(tree, codes), jax.tree.unflatten(tree, scales))


def _decoded(state: EightBits) -> PyTree:
  flat = jax.tree_util.tree_leaves_with_path(state.codes)
  # where the scales are None, a whole subtree of the state may be absent: frozen variables
  tree: Any = jax.tree.structure(state.codes)
  scales = tree.flatten_up_to(state.scales)
  wide = [
    x if scale is None else decode(x, scale, _is_signed(path))
    for (path, x), scale in zip(flat, scales, strict=True)
  ]
  return jax.tree.unflatten(tree, wide)


def encode(x: jax.Array, signed: bool) -> tuple[jax.Array, jax.Array]:
  """Returns the codes and the scales of an array that has blocks.

  A mean square that is not 0 does not become 0, as it does in bitsandbytes: the update of a number
  whose gradients are much smaller than those of its block would be divided by nearly nothing.
  """
  blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block_of(x.shape))
  scale = jnp.abs(blocks).max(-1)
  scaled = blocks / jnp.where(scale == 0, 1, scale)[..., None]
  values = code_values(signed)
  middles = jnp.asarray((values[1:] + values[:-1]) / 2)
  codes = jnp.searchsorted(middles, scaled, method='scan_unrolled')
  if not signed:
    codes = jnp.where(scaled > 0, jnp.maximum(codes, 1), codes)
  return codes.astype(jnp.uint8).reshape(x.shape), scale


def decode(codes: jax.Array, scale: jax.Array, signed: bool) -> jax.Array:
  """Returns the array that codes and scales stand for, float32."""
  values = jnp.asarray(code_values(signed))[codes.astype(jnp.int32)]
  blocks = values.reshape(*scale.shape, -1) * scale[..., None]
  return blocks.reshape(codes.shape)


def block_of(shape: tuple[int, ...]) -> int:
  """Returns the numbers of a block of an array of this shape; 0 if it is kept as it is."""
  if int(np.prod(shape)) < _SMALLEST:
    return 0
  last = shape[-1]
  block = next(size for size in range(min(BLOCK, last), 0, -1) if last % size == 0)
  return block if block >= _SHORTEST else 0


def _is_signed(path: jax.tree_util.KeyPath) -> bool:
  fields = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
  return fields[-1] not in ('v', 'nu', 'nu_max', 'sum_of_squares', 'e_g', 'e_x')
