"""Chooses how attention is computed where the tokens of a row are split over devices.

The choice is made from shapes alone, by an estimate of the seconds of a forward pass. The numbers
are an H100's. Other devices have similar ratios between them.
"""

import dataclasses
from collections.abc import Mapping

import jax

from paxlite.context_parallelism import halo_attention
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import Way
from paxlite.layers.attention.tiled_attention import TILE

_FLOPS = 989e12  # FLOP/s
_LINK, _MEMORY = 450e9, 3352e9  # bytes/s that a device sends, and those of its memory
_START = 20e-6  # seconds until a collective and the kernels after it run
_PASSES = 6  # how often scores in main memory are read or written
_MORE_BYTES = 256 << 20  # a way may hold so much more for a layer than the leanest way


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The attention of one layer on one device."""

  rows: int  # rows of the batch that the device has a part of
  length: int  # tokens of a row
  heads: int  # heads of queries
  kv_heads: int  # heads of keys
  width: int  # width of a head
  size: int  # devices that share a row
  window: int = 0  # the keys that a query sees, with its own; ≤ 0 means all
  # whether the kernel needs an array of the pairs of tokens of one segment
  masked_by_array: bool = False
  # the most segments of a row if a kernel of whole rows takes their bounds instead of that array;
  # else 0
  max_segments: int = 0
  fused: bool = True  # whether a fused kernel computes it
  itemsize: int = 2  # bytes of a number


@dataclasses.dataclass(frozen=True)
class WayEstimate:
  """Estimates of one device's forward pass: seconds, bytes sent, bytes of scores or masks."""

  seconds: float
  sent: float
  held: float


def shapes_of(case: Case) -> Shapes:
  """Returns the shapes of a case whose rows the mesh splits, without its dropout and its bias.

  Its arrays are those of all devices, with as many keys as queries.
  """
  softmax = dataclasses.replace(case.softmax, dropout=None)
  size = case.shards('length')
  of_device = dataclasses.replace(case.of_one_device(), softmax=softmax, bias=None)
  kernel = attention_kernels.local(of_device)
  (rows, length, heads, width), kv_heads = of_device.q.shape, of_device.k.shape[2]
  # the way `heads` gives a device a share of the heads
  share = jax.ShapeDtypeStruct((rows, length, max(heads // size, 1), width), case.q.dtype)
  return Shapes(
    rows=rows, length=length, heads=heads, kv_heads=kv_heads, width=width, size=size,
    window=case.softmax.window, masked_by_array=kernel.masks_by_array(of_device),
    max_segments=kernel.bounds(dataclasses.replace(of_device, q=share)), fused=kernel.is_fused,
    itemsize=case.q.dtype.itemsize,
  )  # fmt: skip


def fastest(found: Mapping[Way, WayEstimate]) -> Way:
  """Returns the way with the least seconds among those that hold little more than the leanest."""
  least = min(e.held for e in found.values())
  small = {way: e for way, e in found.items() if e.held <= least + _MORE_BYTES}
  return min(small, key=lambda way: small[way].seconds)


def estimates(shapes: Shapes) -> dict[Way, WayEstimate]:
  """Returns the estimates of the ways that the shapes allow."""
  found: dict[Way, WayEstimate] = {'gather': _gather(shapes)}
  if has_ring(shapes):
    found['ring'] = _window(shapes) if shapes.window > 0 else _ring(shapes)
  if has_heads(shapes):
    found['heads'] = _heads(shapes)
  return found


def has_ring(shapes: Shapes) -> bool:
  """Returns whether all devices have two halves of equal length, or one part with a window."""
  return shapes.length % (shapes.size * (1 if shapes.window > 0 else 2)) == 0


def has_heads(shapes: Shapes) -> bool:
  """Returns whether each device gets the same number of heads."""
  return all(n % shapes.size == 0 for n in (shapes.length, shapes.heads, shapes.kv_heads))


def _token_bytes(s: Shapes) -> float:
  """Bytes of one head of all tokens of a device."""
  return s.rows * s.length / s.size * s.width * s.itemsize


def _masks(s: Shapes, queries: float, keys: float) -> float:
  """Bytes of an array of pairs of tokens."""
  return s.rows * queries * keys * s.itemsize if s.masked_by_array else 0.0


def _pair_seconds(s: Shapes, pairs: float, heads: float) -> float:
  """Seconds for pairs of a query and a key in a fused kernel, or in plain XLA by blocks."""
  seconds = 4 * pairs * heads * s.width / _FLOPS
  if not s.fused:
    seconds += _PASSES * 4 * pairs * heads / _MEMORY
  return seconds + (2 * pairs * s.itemsize / _MEMORY if s.masked_by_array else 0.0)


def _gather(s: Shapes) -> WayEstimate:
  sent = (s.size - 1) * 2 * s.kv_heads * _token_bytes(s)
  pairs = s.rows * s.length**2 / s.size
  scores = 4 * pairs * s.heads
  seconds = 4 * pairs * s.heads * s.width / _FLOPS + _PASSES * scores / _MEMORY
  return WayEstimate(seconds + sent / _LINK + 2 * _START, sent, scores)


def _ring(s: Shapes) -> WayEstimate:
  exchanged = (s.heads + s.kv_heads) * _token_bytes(s)
  step = 2 * s.kv_heads * _token_bytes(s)
  seconds = _pair_seconds(s, s.rows * s.length**2 / 2 / s.size, s.heads)
  waits = (s.size - 1) * max(step / _LINK - seconds / s.size, 0.0)
  half = min(s.length / s.size / 2, TILE)
  # each step reads and writes sums of contexts in float32, and writes and reads its own contexts
  added = s.size * s.heads * _token_bytes(s) * (2 * 4 / s.itemsize + 2)
  return WayEstimate(
    seconds + exchanged / _LINK + waits + added / _MEMORY + (s.size + 4) * _START,
    exchanged + (s.size - 1) * step,
    2 * _masks(s, half, half),
  )


def _window(s: Shapes) -> WayEstimate:
  own = s.length // s.size
  row = own + halo_attention.reach(s.window, own, s.size)
  sent = 2 * s.kv_heads * _token_bytes(s) * (row / own - 1)
  piece = halo_attention.piece(s.window, own, TILE) if s.masked_by_array else own
  computed = row - own + piece  # tokens of a call of the kernel
  pairs = s.rows * own / piece * computed * min(s.window, computed)
  seconds = _pair_seconds(s, pairs, s.heads) + sent / _LINK + 2 * _START
  return WayEstimate(seconds, sent, _masks(s, computed, computed))


def _heads(s: Shapes) -> WayEstimate:
  if s.max_segments:
    s = dataclasses.replace(s, masked_by_array=False)
  sent = 2 * (s.heads + s.kv_heads) * _token_bytes(s) * (s.size - 1) / s.size
  keys = min(s.window, s.length) if s.window > 0 else s.length / 2
  seconds = _pair_seconds(s, s.rows * s.length * keys, s.heads / s.size)
  sums = 4 * s.rows * s.length * s.heads / s.size * s.max_segments  # cuDNN's, of each segment
  held = _masks(s, s.length, s.length) + sums
  return WayEstimate(seconds + sent / _LINK + 4 * _START, sent, held)
