"""Attention of the latest tokens of each row, one or a few, with a cache of keys."""

import abc
import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from paxlite.layers.attention.attention_case import Case, Kernel
from paxlite.layers.attention.cache_encoding import EncodedVectors
from paxlite.layers.attention.paged_vectors import PagedVectors
from paxlite.layers.attention.partial_attention import sink_logits
from paxlite.layers.attention.softmax_attention import Softmax, attention_weights, masked
from paxlite.parallel import partitioning

MOST_QUERIES = 8  # of a row: the latest token, and drafts behind it


def refusal(case: Case) -> str | None:
  """Returns why a case is none of this module's."""
  queries = case.q.shape[1]
  if queries > MOST_QUERIES or (queries > 1 and case.visible.is_from_first):
    return f'takes up to {MOST_QUERIES} queries a row, behind cached keys'
  return 'does not support attention dropout' if case.softmax.dropout is not None else None


def decoded(case: Case) -> Case:
  """Returns the case with arrays in the place of 8 bits, unless few queries read these.

  Queries in float16 do not: scales times weights of values would be below its smallest numbers.
  """
  if not (isinstance(case.k, EncodedVectors) and isinstance(case.v, EncodedVectors)):
    return case
  dtype = case.q.dtype
  if refusal(case) is None and case.shards('length') == 1 and dtype != jnp.float16:
    return case
  return dataclasses.replace(case, k=case.k.decoded(dtype), v=case.v.decoded(dtype))


class XlaCachedKernel(Kernel):
  """Reads keys and values once, in the order of the cache, [B, K, S, H].

  With [B, S, K, H], as other kernels have it, XLA would transpose both for each token. With a
  small window, the keys before it are not read. What is encoded has its scales in the scores and
  in the weights of the values, so that XLA reads 8 bits alone.
  """

  name = 'plain XLA for few queries'
  reads_encoded = True
  is_fused = False

  def refusal(self, case: Case) -> str | None:
    return refusal(case)

  def attend(self, case: Case) -> jax.Array:
    case = _within_window(case)
    q_BTNH, k_BSKH, v_BSKH = case.arrays
    (B, T, N, _), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    (k_BKSH, of_key), (v_BKSH, of_value) = (_by_head(x, q_BTNH.dtype) for x in (k_BSKH, v_BSKH))
    q_BKMH = by_key_head(q_BTNH * case.softmax.query_scale, K)
    scores_BKMS = jnp.einsum('BKMH,BKSH->BKMS', q_BKMH, k_BKSH, preferred_element_type=jnp.float32)
    scores_BNTS = (scores_BKMS * of_key).reshape(B, N, T, S)
    bias_JNTS = cast('jax.Array | None', case.bias)
    scores_BNTS = masked(scores_BNTS, case.visible.mask(T, S), bias_JNTS, case.softmax)
    weights_BNTS = attention_weights(scores_BNTS, case.softmax)
    weights_BKMS = weights_BNTS.reshape(B, K, N // K * T, S) * of_value
    weights_BKMS = weights_BKMS.astype(v_BKSH.dtype)
    return by_query(jnp.einsum('BKMS,BKSH->BKMH', weights_BKMS, v_BKSH), T)


class CachedKernel(Kernel):
  """Reads the cached keys and values of each row as far as it has some, on each device for itself.

  Its name does not matter where a whole sequence asks for a fused kernel, so it is not `is_fused`.
  """

  is_fused = False

  def refusal(self, case: Case) -> str | None:
    heads, start = case.shards('act_heads'), case.visible.start
    reasons = {
      'is left out by USE_FLASH_ATTENTION=False': not case.fused,
      'takes no bias, segments or cache without a number of tokens': (
        case.bias is not None or case.is_packed or isinstance(start, int)
      ),
      'needs whole sequences, and the keys of its heads, on each device': (
        case.over_context
        or case.shards('length') > 1
        or case.shards('kv_length') > 1
        or case.q.shape[2] % heads != 0
        or case.k.shape[2] % heads != 0
      ),
      **self.reasons(case),
    }
    return refusal(case) or next((why for why, holds in reasons.items() if holds), None)

  @abc.abstractmethod
  def reasons(self, case: Case) -> dict[str, bool]:
    """Returns further reasons to refuse a case, and whether each holds."""

  @abc.abstractmethod
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
    """Returns the context of one device's rows and heads, [B, T, N, width of a value].

    Args:
      q_BTNH: Queries.
      k_BKSH: The cached keys, or with a table their pages.
      v_BKSH: Their values.
      start_B: The slot of each row's first query; keys behind its last query have no meaning.
      logit_N: The logits of attention sinks, float32; None: there are none.
      table_BW: The pages of each row, if the kernel reads_pages; None: there are none.
      softmax: Has the scale, the cap and the window.
    """

  def attend(self, case: Case) -> jax.Array:
    (q_BTNH, k, v), softmax = case.arrays, case.softmax
    start_B = jnp.broadcast_to(case.visible.start, q_BTNH.shape[:1]).astype(jnp.int32)
    logit_N = sink_logits(softmax, q_BTNH.shape[2])
    table_BW: jax.Array | None = None
    of_kv: tuple[str | None, ...] = 'batch', 'act_kv_heads', None, None
    if isinstance(case.k, PagedVectors) and isinstance(case.v, PagedVectors):
      table_BW, of_kv = case.k.table, (None, 'act_kv_heads', None, None)
      k, v = case.k.pages, case.v.pages
    else:
      k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    arrays = q_BTNH, k, v, start_B, logit_N, table_BW
    local = functools.partial(self.attend_locally, softmax=softmax)
    active = partitioning.active_mesh()
    if active is None:
      return local(*arrays)
    mesh, rules = active
    of_q = 'batch', None, 'act_heads', None
    names = of_q, of_kv, of_kv, ('batch',), ('act_heads',), ('batch', None)
    specs = tuple(
      None if x is None else partitioning.spec_of(x, axes, mesh, rules)
      for axes, x in zip(names, arrays, strict=True)
    )
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return sharded(*arrays)


def by_key_head(q_BTNH: jax.Array, heads: int) -> jax.Array:
  """Returns the queries of each head of keys, [B, K, M, H]: T neighbors for each query head."""
  B, T, N, H = q_BTNH.shape
  q_BTKGH = q_BTNH.reshape(B, T, heads, N // heads, H)
  return q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B, heads, N // heads * T, H)


def by_query(context_BKMH: jax.Array, queries: int) -> jax.Array:
  """Returns the contexts of such queries, [B, T, N, H]."""
  B, K, M, H = context_BKMH.shape
  context_BKGTH = context_BKMH.reshape(B, K, M // queries, queries, H)
  return context_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, queries, K * (M // queries), H)


def _by_head(
  x: jax.Array | EncodedVectors, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array | float]:
  """Returns keys or values [B, K, S, H], and factors of products with them, [B, K, 1, S]."""
  if isinstance(x, EncodedVectors):
    return x.numbers.swapaxes(1, 2).astype(dtype), x.scale.swapaxes(1, 2)[:, :, None]
  return x.swapaxes(1, 2), 1.0


def _within_window(case: Case) -> Case:
  """Returns the case of the keys in the windows of each row's queries.

  XLA copies them, so that they are read twice and written once. Where that is no less than to read
  all keys, the case stays as it is.
  """
  window, (_, k_BSKH, v_BSKH) = case.softmax.window, case.arrays
  (B, S), start = k_BSKH.shape[:2], case.visible.start
  width = window + case.q.shape[1] - 1
  if window <= 0 or 3 * width >= S or case.visible.segments is not None or case.bias is not None:
    return case
  start_B = jnp.broadcast_to(start, (B,))
  first_B = jnp.clip(start_B - window + 1, 0, S - width)
  of_row = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, width, 0)
  visible = dataclasses.replace(case.visible, start=start_B - first_B)
  k, v = jax.tree.map(lambda x: jax.vmap(of_row)(x, first_B), (k_BSKH, v_BSKH))
  return dataclasses.replace(case, k=k, v=v, visible=visible)
