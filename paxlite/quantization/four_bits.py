"""Frozen weights of four bits: NF4 with scales that are quantized as well, and int4.

The values of a block share a scale. A block has 64 values that a product with activations sums
over, which follow one another; fewer, if their number is not divisible by 64.
"""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.quantization.schemes import Arrays, QuantizationScheme

BLOCK = 64  # values that share a scale, as in bitsandbytes
_TINY = np.finfo(np.float32).tiny  # XLA takes smaller numbers for 0
_GROUP = 256  # scales that share a scale

# The quantiles of a normal distribution of https://arxiv.org/abs/2305.14314, appendix E
NF4 = np.array(
  [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
  ],
  np.float32,
)  # fmt: skip


def dynamic_code() -> np.ndarray:
  """Returns the 256 values of dynamic 8-bit numbers with a sign, sorted.

  Of 2^i numbers of each sign, each is the middle of an interval of those that divide 0.1 to 1,
  times 10^(i − 6), for i from 0 to 6: https://arxiv.org/abs/1511.04561, section 2.1. They are
  rounded where bitsandbytes, with torch.linspace, rounds them.
  """
  values = [0.0, 1.0]
  for i in range(7):
    steps, first = np.arange(2**i + 1), np.float32(0.1)
    step = np.float64((np.float32(1) - first) / np.float32(2**i))
    from_both_ends = np.where(steps <= 2**i // 2, first + step * steps, 1 - step * (2**i - steps))
    edges = from_both_ends.astype(np.float32)
    means = (edges[:-1] + edges[1:]) / 2 * np.float32(10.0 ** (i - 6))
    values += [*means, *-means]
  return np.sort(np.asarray(values, np.float32))


@dataclasses.dataclass(frozen=True)
class _FourBits(QuantizationScheme):
  """Indices of 16 values, two in a byte, times the scale of their block.

  Neighbors of the last dimension that is summed over share a byte: it is the packed dimension.
  """

  rest = 'bfloat16'

  def encode(self, w: jax.Array, summed: Sequence[int]) -> dict[str, jax.Array]:
    w, packed = w.astype(jnp.float32), max(summed)
    sizes = _block_sizes(w.shape, summed)
    split = [n for size, block in zip(w.shape, sizes, strict=True) for n in (size // block, block)]
    largest = jnp.abs(w.reshape(split)).max(range(1, 2 * w.ndim, 2))
    scales, arrays = self.encode_scales(largest, packed)
    indices = self.indices(w, _repeated(scales, w.shape)).astype(jnp.uint8)
    return {'values': _in_bytes(indices, packed), **arrays}

  def decode(self, arrays: Arrays, shape: Sequence[int]) -> jax.Array:
    halves = arrays['values'].shape
    halved = [i for i, n in enumerate(shape) if halves[i] != n]
    packed = (halved or [shape.index(1)])[0]
    scales = self.decode_scales(arrays, packed)
    indices = _of_bytes(arrays['values'], packed, shape[packed])
    return self.values(indices) * _repeated(scales, shape)

  @abc.abstractmethod
  def encode_scales(
    self, largest: jax.Array, packed: int
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns what the values of each block are divided by, and the arrays that keep it.

    Args:
      largest: The largest absolute value of each block, with as many dimensions as the weight.
      packed: The packed dimension.
    """

  @abc.abstractmethod
  def decode_scales(self, arrays: Arrays, packed: int) -> jax.Array:
    """Returns what the values of each block are multiplied with."""

  @abc.abstractmethod
  def indices(self, w: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns numbers from 0 to 15; the scales have the shape of the weight."""

  @abc.abstractmethod
  def values(self, indices: jax.Array) -> jax.Array:
    """Returns the float32 values of indices."""


@dataclasses.dataclass(frozen=True)
class Nf4(_FourBits):
  """NF4 with double quantization, 4.13 bits a weight: https://arxiv.org/abs/2305.14314, section 3.

  The values are those of bitsandbytes for the transposed weight. The scales of blocks, less their
  mean, are dynamic 8-bit numbers. 256 of them share a scale: those that follow one another if the
  packed dimension comes last.
  """

  def encode_scales(
    self, largest: jax.Array, packed: int
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    mean, number = largest.mean(), math.ceil(largest.size / _GROUP)
    ordered = jnp.moveaxis(largest, packed, -1)
    differences = jnp.pad(ordered.ravel() - mean, (0, number * _GROUP - largest.size))
    groups = jnp.abs(differences.reshape(number, _GROUP)).max(1)
    scaled = differences.reshape(number, _GROUP) * (1 / jnp.maximum(groups, _TINY))[:, None]
    code = dynamic_code()
    indices = jnp.searchsorted((code[:-1] + code[1:]) / 2, scaled.ravel())[: largest.size]
    scales = indices.astype(jnp.uint8).reshape(ordered.shape)
    ones = (1,) * (largest.ndim - 1)
    arrays = {
      'scales': jnp.moveaxis(scales, -1, packed),
      'groups': groups.reshape(number, *ones),
      'mean': mean.reshape(1, *ones),
    }
    return largest, arrays

  def decode_scales(self, arrays: Arrays, packed: int) -> jax.Array:
    scales, groups = arrays['scales'], arrays['groups'].ravel()
    ordered = [n for i, n in enumerate(scales.shape) if i != packed] + [scales.shape[packed]]
    group = jnp.moveaxis(jnp.arange(scales.size).reshape(ordered) // _GROUP, -1, packed)
    # without the barrier XLA may fuse product and sum, which would then be rounded once
    products = jax.lax.optimization_barrier(jnp.asarray(dynamic_code())[scales] * groups[group])
    return products + arrays['mean']

  def indices(self, w: jax.Array, scales: jax.Array) -> jax.Array:
    scaled = jnp.clip(w * (1 / jnp.maximum(scales, _TINY)), -1, 1)
    bounds = (NF4[:-1] + NF4[1:]) / 2
    return functools.reduce(operator.add, [(scaled > b).astype(jnp.uint8) for b in bounds])

  def values(self, indices: jax.Array) -> jax.Array:
    return jnp.asarray(NF4)[indices]


@dataclasses.dataclass(frozen=True)
class Int4(_FourBits):
  """Whole numbers from −7 to 7 with a bfloat16 scale for each block, 4.25 bits a weight."""

  def encode_scales(
    self, largest: jax.Array, packed: int
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    scales = (jnp.where(largest == 0, 1, largest) / 7).astype(jnp.bfloat16)
    return scales.astype(jnp.float32), {'scales': scales}

  def decode_scales(self, arrays: Arrays, packed: int) -> jax.Array:
    return arrays['scales'].astype(jnp.float32)

  def indices(self, w: jax.Array, scales: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(w / scales), -7, 7) + 8

  def values(self, indices: jax.Array) -> jax.Array:
    return indices.astype(jnp.float32) - 8


def _block_sizes(shape: Sequence[int], summed: Sequence[int]) -> list[int]:
  """Returns the size of a block in each dimension of a weight.

  A block covers neighbors of the last dimensions that are summed over: the dimensions of a head,
  and several heads where a head has fewer than BLOCK.
  """
  sizes, left = [1] * len(shape), BLOCK
  for i in sorted(summed, reverse=True):
    sizes[i] = math.gcd(shape[i], left)
    left //= sizes[i]
    if sizes[i] < shape[i]:
      break
  return sizes


def _repeated(scales: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Returns the scale of each value of a weight."""
  for i, size in enumerate(shape):
    scales = jnp.repeat(scales, size // scales.shape[i], axis=i)
  return scales


def _in_bytes(indices: jax.Array, packed: int) -> jax.Array:
  """Returns bytes of two indices each, with half the size in one dimension."""
  if indices.shape[packed] % 2:
    indices = jnp.pad(indices, [(0, int(i == packed)) for i in range(indices.ndim)])
  shape = indices.shape
  pairs = indices.reshape(*shape[:packed], shape[packed] // 2, 2, *shape[packed + 1 :])
  first, second = (jax.lax.index_in_dim(pairs, i, packed + 1, keepdims=False) for i in (0, 1))
  return first << 4 | second


def _of_bytes(values: jax.Array, packed: int, size: int) -> jax.Array:
  pairs = jnp.stack([values >> 4, values & 15], axis=packed + 1)
  shape = values.shape
  indices = pairs.reshape(*shape[:packed], 2 * shape[packed], *shape[packed + 1 :])
  return jax.lax.slice_in_dim(indices, 0, size, axis=packed)
