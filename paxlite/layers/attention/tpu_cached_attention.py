"""Attention of few queries a row with cached keys, by a kernel of Pallas for TPUs.

The softmax is computed block by block of keys (https://arxiv.org/abs/2205.14135). The blocks behind
a row's tokens, and those before its window, are not read.

XLA's scatter would have the cache in another order than the kernel, and copy all of it for each
token. So new tokens are put in by a kernel too.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlite.layers.attention.attention_case import Case, KernelCall
from paxlite.layers.attention.cached_attention import (
  MOST_QUERIES,
  CachedKernel,
  by_key_head,
  by_query,
)
from paxlite.layers.attention.paged_vectors import PagedVectors
from paxlite.layers.attention.softmax_attention import Softmax
from paxlite.layers.cross_entropy import cap_logits
from paxlite.parallel import partitioning

_SIZES = 512, 256, 128  # slots of a block
# of a block of keys and its values; the chip's own memory holds two of them and the scores
_MOST_BYTES = 2 << 20
_NO_LOGIT = -1e30


class TpuCachedKernel(CachedKernel):
  """Reads the blocks of keys and values that have tokens that a query sees."""

  name = 'the kernel for cached keys on TPUs'
  platform = 'tpu'
  primitives = re.compile(r'\bcached_attention\b')
  reads_pages = True

  def reasons(self, case: Case) -> dict[str, bool]:
    (_, S, K, H), width = case.k.shape, case.v.shape[3]
    slot = K // case.shards('act_heads') * (H + width) * case.k.dtype.itemsize
    if isinstance(case.k, PagedVectors):
      size = case.k.pages.shape[2]
      fits = size % _tile(case.k.dtype) == 0 and size * slot <= 2 * _MOST_BYTES
      return {'takes pages of whole registers that fit into the chip': not fits}
    return {'takes multiples of 128 slots, of which 128 fit into the chip': not _size(S, slot)}

  def attend_locally(
    self,
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    start_B: jax.Array,
    logit_N: jax.Array | None,
    table_BW: jax.Array | None,
    softmax: Softmax,
  ) -> jax.Array:
    (_, T, N, _), K = q_BTNH.shape, k_BKSH.shape[1]
    q_BKMH = by_key_head(q_BTNH * softmax.query_scale, K)
    M = q_BKMH.shape[2]
    tile = _tile(q_BKMH.dtype)
    q_BKMH = jnp.pad(q_BKMH, [(0, 0), (0, 0), (0, -M % tile), (0, 0)])
    logit_N = jnp.full(N, _NO_LOGIT) if logit_N is None else logit_N
    logit_KM1 = jnp.repeat(logit_N.reshape(K, N // K), T, 1)[..., None]
    logit_KM1 = jnp.pad(logit_KM1, [(0, 0), (0, -M % tile), (0, 0)])
    context_BKMH = _attend(q_BKMH, k_BKSH, v_BKSH, start_B, logit_KM1, table_BW, T, softmax)
    return by_query(context_BKMH[:, :, :M], T)

  def flops(self, call: KernelCall) -> float:
    """Returns the FLOPs of a full cache: how long rows are is not known."""
    q, _, k, v = call.operands[:4]
    return 2.0 * math.prod(q[:3]) * k[2] * (k[3] + v[3])


def appended(cache: jax.Array, new: jax.Array, start_B: jax.Array) -> jax.Array | None:
  """Returns a cache [B, K, S, H] with a few tokens [B, T, K, H] more; None: not by this kernel."""
  if partitioning.active_kind() != 'tpu' or cache.ndim != 4 or new.shape[1] > MOST_QUERIES:
    return None
  active, new_BKTH = partitioning.active_mesh(), new.swapaxes(1, 2)
  if cache.shape[2] % _SIZES[-1]:
    return None
  if active is None:
    return put(cache, new_BKTH, start_B)
  of_cache = partitioning.spec_of(cache, ('batch', 'act_kv_heads', None, None), *active)
  specs = of_cache, of_cache, partitioning.spec_of(start_B, ('batch',), *active)
  return jax.shard_map(put, mesh=active[0], in_specs=specs, out_specs=of_cache, check_vma=False)(
    cache, new_BKTH, start_B
  )


def appended_to_pages(paged: PagedVectors, new: jax.Array) -> jax.Array | None:
  """Returns the pages with a few tokens [B, T, K, H] more; None: not by this kernel."""
  pages, T = paged.pages, new.shape[1]
  if partitioning.active_kind() != 'tpu' or pages.ndim != 4 or T > MOST_QUERIES:
    return None
  if pages.shape[2] % _tile(pages.dtype):
    return None
  active, arrays = (
    partitioning.active_mesh(), (pages, new.swapaxes(1, 2), paged.length - T, paged.table)
  )  # fmt: skip
  if active is None:
    return put(*arrays)
  names = (None, 'act_kv_heads', None, None), ('batch', 'act_kv_heads', None, None)
  of_pages, of_new = (
    partitioning.spec_of(x, of, *active) for x, of in zip(arrays[:2], names, strict=True)
  )
  specs = of_pages, of_new, PartitionSpec(), PartitionSpec()
  sharded = jax.shard_map(put, mesh=active[0], in_specs=specs, out_specs=of_pages, check_vma=False)
  return sharded(*arrays)


def put(
  cache_BKSH: jax.Array,
  new_BKTH: jax.Array,
  start_B: jax.Array,
  table_BW: jax.Array | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Returns a cache with T tokens from slot `start_B` of each row on, in place.

  Those beyond the cache are dropped. S is a multiple of the rows of a register.

  Args:
    cache_BKSH: The cache, or pages [P + 1, K, p, H], of which p is such a multiple.
    new_BKTH: The tokens.
    start_B: Their first slots.
    table_BW: The pages of each row; None: each row has slots of its own.
    interpret: Whether Pallas' interpreter runs it.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (_, K, size, H), (B, _, T, _) = cache_BKSH.shape, new_BKTH.shape
  tile, slots = _tile(cache_BKSH.dtype), size if table_BW is None else size * table_BW.shape[1]
  block = lambda start, step: jnp.minimum(start // tile + step, slots // tile - 1)
  scalars = [start_B] if table_BW is None else [start_B, table_BW]

  def kernel(*refs: Any) -> None:
    starts, (cache_ref, new_ref, put_ref) = refs[0], refs[len(scalars) :]
    row, step = pl.program_id(0), pl.program_id(1)
    start, x_KsH = starts[row], cache_ref[0]
    slot = block(start, step) * tile + jax.lax.broadcasted_iota(jnp.int32, x_KsH.shape, 1)
    for t in range(T):
      x_KsH = jnp.where(slot == start + t, new_ref[0, :, t : t + 1], x_KsH)
    put_ref[0] = x_KsH

  def place(row: jax.Array, step: jax.Array, starts: Any, *tables: Any) -> tuple[Any, ...]:
    number = block(starts[row], step)
    if not tables:
      return row, 0, number, 0
    of_page = size // tile
    return _page(tables[0], row, number // of_page, cache_BKSH), 0, number % of_page, 0

  of_block = pl.BlockSpec((1, K, tile, H), place)
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(B, 1 if T == 1 else 2),
      in_specs=[of_block, pl.BlockSpec((1, K, T, H), lambda row, *_: (row, 0, 0, 0))],
      out_specs=of_block,
    ),
    out_shape=jax.ShapeDtypeStruct(cache_BKSH.shape, cache_BKSH.dtype),
    input_output_aliases={len(scalars): 0},
    interpret=interpret,
    name='put_into_cache',
  )(*scalars, cache_BKSH, new_BKTH.astype(cache_BKSH.dtype))


def _page(table: Any, row: jax.Array, number: jax.Array, pages: jax.Array) -> jax.Array:
  """Returns a page of a row, or the one that belongs to no row."""
  return jnp.minimum(table[row, number], len(pages) - 1)


def _tile(dtype: jnp.dtype) -> int:
  """Returns the rows of a register."""
  return 32 // dtype.itemsize


def _size(slots: int, slot_bytes: int) -> int:
  """Returns how many slots a block has; 0 if there are no blocks that fit."""
  fits = (n for n in _SIZES if slots % n == 0 and n * slot_bytes <= _MOST_BYTES)
  return next(fits, 128 if slots % 128 == 0 and 128 * slot_bytes <= 2 * _MOST_BYTES else 0)


def _attend(
  q_BKMH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSH: jax.Array,
  start_B: jax.Array,
  logit_KM1: jax.Array,
  table_BW: jax.Array | None,
  queries: int,
  softmax: Softmax,
) -> jax.Array:
  """Returns the context [B, K, M, width]; M counts `queries` neighbors for each query head."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (B, K, M, H), (S, width) = q_BKMH.shape, v_BKSH.shape[2:]
  size = _size(S, K * (H + width) * k_BKSH.dtype.itemsize)
  scalars = [start_B]
  if table_BW is not None:  # a block is a page
    size, S, scalars = S, S * table_BW.shape[1], [start_B, table_BW]
  window, steps = softmax.window, S // size
  if window > 0:
    steps = min(steps, (window + queries - 3) // size + 2)

  def blocks(start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the last block that a row reads."""
    last = jnp.minimum(start + queries - 1, S - 1) // size
    return (jnp.maximum(start - window + 1, 0) // size if window > 0 else 0 * last), last

  def block_of(row: jax.Array, step: jax.Array, starts: Any, *tables: Any) -> tuple[Any, ...]:
    first, last = blocks(starts[row])
    number = jnp.minimum(first + step, last)  # a block that stays is not read again
    return (_page(tables[0], row, number, k_BKSH), 0, 0, 0) if tables else (row, 0, number, 0)

  def kernel(*refs: Any) -> None:
    starts, arrays = refs[0], refs[len(scalars) :]
    q_ref, logit_ref, k_ref, v_ref, context_ref, largest_ref, total_ref, sum_ref = arrays
    row, step = pl.program_id(0), pl.program_id(1)
    start = starts[row]
    first, last = blocks(start)

    @pl.when(step == 0)
    def _() -> None:
      largest_ref[...] = logit_ref[...]  # the sink's key has a value of 0
      total_ref[...] = jnp.ones_like(total_ref)
      sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(first + step <= last)
    def _() -> None:
      of_heads = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
      scores_KMs = of_heads(q_ref[0], k_ref[0], (((2,), (2,)), ((0,), (0,))))
      scores_KMs = cap_logits(scores_KMs, softmax.logit_cap)
      number = lambda axis: jax.lax.broadcasted_iota(jnp.int32, scores_KMs.shape, axis)
      distance = start + number(1) % queries - (first + step) * size - number(2)
      is_seen = (distance >= 0) & (distance < window) if window > 0 else distance >= 0
      scores_KMs = jnp.where(is_seen, scores_KMs, _NO_LOGIT)
      largest_KM1 = jnp.maximum(largest_ref[...], scores_KMs.max(2, keepdims=True))
      weights_KMs = jnp.exp(scores_KMs - largest_KM1)
      share_KM1 = jnp.exp(largest_ref[...] - largest_KM1)
      values_KsH = v_ref[0]
      slot = (first + step) * size + jax.lax.broadcasted_iota(jnp.int32, values_KsH.shape, 1)
      # behind a row's tokens there may be those of another row, whose NaN must not reach this one
      values_KsH = jnp.where(slot < start + queries, values_KsH, 0)
      values_KMH = of_heads(
        weights_KMs.astype(v_ref.dtype), values_KsH, (((2,), (1,)), ((0,), (0,)))
      )
      total_ref[...] = share_KM1 * total_ref[...] + weights_KMs.sum(2, keepdims=True)
      sum_ref[...] = share_KM1 * sum_ref[...] + values_KMH
      largest_ref[...] = largest_KM1

    @pl.when(step == steps - 1)
    def _() -> None:
      context_ref[0] = (sum_ref[...] / total_ref[...]).astype(context_ref.dtype)

  of_row = lambda *shape: pl.BlockSpec((1, *shape), lambda row, *_: (row, 0, 0, 0))
  of_block = lambda width: pl.BlockSpec((1, K, size, width), block_of)
  scratch = lambda width: pltpu.VMEM((K, M, width), jnp.float32)
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(B, steps),
      in_specs=[
        of_row(K, M, H),
        pl.BlockSpec((K, M, 1), lambda *_: (0, 0, 0)),
        of_block(H),
        of_block(width),
      ],
      out_specs=of_row(K, M, width),
      scratch_shapes=[scratch(1), scratch(1), scratch(width)],
    ),
    out_shape=jax.ShapeDtypeStruct((B, K, M, width), v_BKSH.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    interpret=partitioning.active_platform() == 'cpu',
    name='cached_attention',
  )(*scalars, q_BKMH, logit_KM1, k_BKSH, v_BKSH)
