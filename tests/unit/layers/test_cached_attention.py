"""Attention of few queries equals attention in plain XLA, with all that a model may ask for."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.generation.engine import Engine
from paxlite.layers.attention import (
  attention_kernels,
  cache_encoding,
  cached_attention,
  cudnn_call,
  softmax_attention,
  tpu_cached_attention,
)
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.cached_attention import XlaCachedKernel
from paxlite.layers.attention.cudnn_attention import CudnnCachedKernel
from paxlite.layers.attention.paged_vectors import NO_PAGE, PagedVectors
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.layers.attention.tpu_cached_attention import TpuCachedKernel
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from tests.unit.generation.test_speculative import model_and_params

B, S, N, H = 2, 12, 4, 8
INDEX = 9  # of the query; later keys are room
STARTS = np.array([3, 0])


def case(
  key_heads: int = N, width: int = H, bias: bool = False, window: int = 0, queries: int = 1,
  **softmax,
) -> Case:  # fmt: skip
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  of_keys = jnp.asarray(np.arange(S) >= STARTS[:, None], jnp.int32)
  return Case(
    drawn(B, queries, N, H), drawn(B, S, key_heads, H), drawn(B, S, key_heads, width),
    Softmax(0.3, window=window, **softmax),
    AttentionMask(INDEX, window, (jnp.ones((B, queries), jnp.int32), of_keys)),
    bias=drawn(1, N, queries, S) if bias else None,
  )  # fmt: skip


def close(found, asked: Case) -> None:
  arrays = *asked.arrays, asked.visible.mask(asked.q.shape[1], asked.k.shape[1]), asked.bias
  expected = softmax_attention.attend(*arrays, asked.softmax)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.cases(fast=5)
@pytest.mark.parametrize(
  'given',
  [
    {},
    {'key_heads': 2},
    {'queries': 3, 'key_heads': 2},
    {'key_heads': 1, 'width': 5},  # as with latents
    {'window': 3, 'queries': 2},  # the keys before it are not read
    {'logit_cap': 0.5},
    {'sink_logit': 0.7},
    {'sink_logit': jnp.arange(4.0)},
    {'window': 4},
    {'window': 3},
    {'window': 3, 'bias': True, 'key_heads': 2, 'sink_logit': 0.7, 'queries': 3},
    {'bias': True},
  ],
  ids=str,
)
def test_it_is_attention(given):
  asked = case(**given)
  assert isinstance(attention_kernels.first(asked), XlaCachedKernel)
  close(XlaCachedKernel().attend(asked), asked)


@pytest.mark.parametrize('dtype', cache_encoding.DTYPES)
@pytest.mark.parametrize(
  'given',
  [{'queries': 3, 'key_heads': 2, 'sink_logit': 0.7}, {'window': 2, 'key_heads': 1}],
  ids=str,
)
def test_attention_with_keys_of_8_bits(given, dtype):
  """It is that with the decoded ones; other kernels for cached keys refuse them by name."""
  asked = dataclasses.replace(case(**given), platform='tpu', capability=9.0)
  asked = dataclasses.replace(asked, visible=AttentionMask(INDEX, asked.softmax.window))
  with cache_encoding.activate(dtype):
    k, v = (cache_encoding.encoded(x) for x in (asked.k, asked.v))
  eight = dataclasses.replace(asked, k=k, v=v)
  refusal = attention_kernels.refusal(TpuCachedKernel(), eight)
  assert refusal == 'does not support a cache of 8 bits'
  assert isinstance(attention_kernels.first(eight), XlaCachedKernel)
  arrays = dict(k=k.decoded(jnp.float32), v=v.decoded(jnp.float32))
  close(
    XlaCachedKernel().attend(cached_attention.decoded(eight)), dataclasses.replace(asked, **arrays)
  )
  whole = dataclasses.replace(eight, visible=AttentionMask(0), q=jnp.zeros((B, S, N, H)))
  assert isinstance(cached_attention.decoded(whole).k, jax.Array)


@pytest.mark.parametrize('dtype', cache_encoding.DTYPES)
def test_small_values_of_many_keys_in_float16(dtype):
  """A scale times a weight of 1 / 4096 is less than the smallest number of float16."""
  k, v = (jnp.full((1, 4096, 1, 2), x, jnp.float16) for x in (0, 0.01))
  with cache_encoding.activate(dtype):
    k, v = (cache_encoding.encoded(x) for x in (k, v))
  q, last = jnp.zeros((1, 1, 1, 2), jnp.float16), AttentionMask(jnp.array([4095]))
  asked = cached_attention.decoded(Case(q, k, v, Softmax(query_scale=1.0), last))
  np.testing.assert_allclose(XlaCachedKernel().attend(asked), 0.01, rtol=1e-2)


def test_a_large_channel_of_keys_costs_int_8_more_than_float_8():
  """As a bias of Qwen2.5: the numbers of a vector have steps of the same size only in int8."""
  asked = dataclasses.replace(case(), visible=AttentionMask(INDEX))
  asked = dataclasses.replace(asked, k=asked.k.at[..., 1].add(100.0))
  plain, moved = XlaCachedKernel().attend(asked), []
  for dtype in cache_encoding.DTYPES:
    with cache_encoding.activate(dtype):
      k = cache_encoding.encoded(asked.k)
    k = k.decoded(jnp.float32)
    found = XlaCachedKernel().attend(dataclasses.replace(asked, k=k))
    moved.append(np.linalg.norm(found - plain))
  assert moved[0] > 2 * moved[1]


@pytest.mark.parametrize('key', [INDEX, INDEX - 1])
def test_a_nan_among_the_visible_keys_reaches_the_context(key):
  asked = case()
  k = asked.k.at[1, key, 0, 0].set(np.nan)
  found = XlaCachedKernel().attend(Case(asked.q, k, asked.v, asked.softmax, asked.visible))
  assert np.isnan(found[1, 0, 0]).all()
  assert np.isfinite(found[0]).all()


@pytest.mark.parametrize('queries', [1, 2])
@pytest.mark.parametrize('index', [0, 1, S - 2])
def test_a_small_window_at_either_end_of_the_cache(index, queries):
  asked = case(window=2, queries=queries)
  asked = dataclasses.replace(asked, visible=AttentionMask(index, 2))
  close(XlaCachedKernel().attend(asked), asked)


SLOTS = 512


def ragged(queries: int, key_heads: int = 2, width: int = 64, window: int = 0, **softmax) -> Case:
  """Rows whose last query is in the first slots, at the bounds of blocks, and in the last slot."""
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  lasts = np.array([queries - 1, 127, 128 + queries, 300, SLOTS - 1])
  starts, rows = jnp.asarray(lasts - queries + 1, jnp.int32), len(lasts)
  return Case(
    drawn(rows, queries, 4, 64), drawn(rows, SLOTS, key_heads, 64),
    drawn(rows, SLOTS, key_heads, width), Softmax(0.125, window=window, **softmax),
    AttentionMask(starts, window), platform='tpu',
  )  # fmt: skip


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize('mesh', [False, True])
@pytest.mark.parametrize(
  'given',
  [
    dict(queries=4, key_heads=2, window=130, sink_logit=jnp.arange(4.0), logit_cap=3.0),
    dict(queries=1, key_heads=4),
    dict(queries=1, key_heads=1, width=40, sink_logit=0.5),
    dict(queries=4, key_heads=4, window=1),
    dict(queries=1, window=128, logit_cap=3.0),
  ],
  ids=str,
)
def test_blocks_of_cached_keys_on_tpus(monkeypatch, given, mesh):
  """In Pallas' interpreter: blocks without a visible key are not read, so they may hold NaN."""
  size = 128
  monkeypatch.setattr(tpu_cached_attention, '_SIZES', (size,))
  asked = ragged(**given)
  assert isinstance(attention_kernels.first(asked), TpuCachedKernel)
  block, start = jnp.arange(SLOTS) // size, asked.visible.start[:, None]
  is_unread = block > (start + asked.q.shape[1] - 1) // size
  if asked.softmax.window:
    is_unread |= block < (start - asked.softmax.window + 1) // size
  unread = lambda x: jnp.where(is_unread[..., None, None], jnp.nan, x)
  with_nan = dataclasses.replace(asked, k=unread(asked.k), v=unread(asked.v))
  axes = ['replica', 'data', 'mdl']
  one = make_mesh([1, 1, 1], [1, 1, 1], axes, jax.devices()[:1])
  active = partitioning.activate(one, partitioning.rules_for(axes))
  with active if mesh else contextlib.nullcontext():
    found = jax.jit(lambda: TpuCachedKernel().attend(with_nan))()
  close(found, asked)


PAGE = 64


def in_pages(x_BSKH, length_B) -> PagedVectors:
  """Returns rows in shuffled pages, with NaN behind each row's tokens and in all other pages."""
  B, S, K, H = x_BSKH.shape
  x = np.asarray(x_BSKH).reshape(B, -1, PAGE, K, H).swapaxes(2, 3)
  W, length_B = S // PAGE, np.asarray(length_B)
  slots = np.arange(S).reshape(W, 1, PAGE, 1)
  x = np.where(slots < length_B.reshape(B, 1, 1, 1, 1), x, np.nan)
  table = np.random.default_rng(1).permutation(B * W + 3)[: B * W].reshape(B, W)
  pages = np.full((B * W + 4, K, PAGE, H), np.nan, np.float32)
  pages[table] = x
  table = np.where(np.arange(W) * PAGE < length_B[:, None], table, NO_PAGE)
  return PagedVectors(*map(jnp.asarray, (pages, table, length_B)), axis=-2)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('mesh', [False, True])
@pytest.mark.parametrize(
  'given',
  [
    dict(queries=4, key_heads=2, window=130, sink_logit=jnp.arange(4.0), logit_cap=3.0),
    dict(queries=1, key_heads=1, width=40),
  ],
  ids=str,
)
def test_pages_of_cached_keys_on_tpus(given, mesh):
  """Also what another row has left behind a row's tokens does not reach it."""
  asked = ragged(**given)
  length_B = asked.visible.start + asked.q.shape[1]
  paged = dataclasses.replace(asked, k=in_pages(asked.k, length_B), v=in_pages(asked.v, length_B))
  assert isinstance(attention_kernels.first(attention_kernels.in_rows(paged)), TpuCachedKernel)
  axes = ['replica', 'data', 'mdl']
  one = make_mesh([1, 1, 1], [1, 1, 1], axes, jax.devices()[:1])
  active = partitioning.activate(one, partitioning.rules_for(axes))
  with active if mesh else contextlib.nullcontext():
    found = jax.jit(lambda: TpuCachedKernel().attend(paged))()
  close(found, asked)
  gathered = attention_kernels.in_rows(dataclasses.replace(paged, platform='cpu'))
  close(XlaCachedKernel().attend(gathered), asked)
  assert attention_kernels.refusal(XlaCachedKernel(), paged) == 'does not read pages'


@pytest.mark.parametrize('tokens', [1, 4])
@pytest.mark.parametrize('seed', range(3))
def test_tokens_are_put_into_pages(tokens, seed):
  """Also over the bound of a page, and beyond the pages of a row, where they are dropped."""
  rng = np.random.default_rng(seed)
  starts, W, p = rng.integers(0, 34, 5), 4, 8
  numbers = rng.permutation(5 * W).reshape(5, W)
  table = np.where(np.arange(W) < rng.integers(0, W + 1, (5, 1)), numbers, NO_PAGE)
  pages, new = rng.normal(size=(5 * W + 1, 2, p, 8)), rng.normal(size=(5, tokens, 2, 8))
  expected = pages.copy()
  for row, start in enumerate(starts):
    for t, slot in enumerate(range(start, start + tokens)):
      if slot < W * p and table[row, slot // p] != NO_PAGE:
        expected[table[row, slot // p], :, slot % p] = new[row, t]
  pages, new, starts, table = map(jnp.asarray, (pages, new, starts, table))
  found = PagedVectors(pages, table, starts + tokens, -2).appended(new)
  np.testing.assert_array_equal(found, expected.astype(np.float32))
  found = tpu_cached_attention.put(pages, new.swapaxes(1, 2), starts, table, interpret=True)
  np.testing.assert_array_equal(found[:-1], expected.astype(np.float32)[:-1])


@pytest.mark.parametrize('sink', [None, jnp.arange(4.0)], ids=['', 'sink'])
def test_what_cudnn_is_asked_for(monkeypatch, sink):
  """XLA computes the request: G query heads are queries of their head of keys."""

  def ffi_call(target, results, *, output_layouts, legacy_backend_config, **_):
    config = json.loads(legacy_backend_config)['cudnn_fmha_backend_config']
    assert (target, config['mask_type']) == ('__cudnn$fmhaSoftmax', 'PADDING')
    assert output_layouts == [None] * len(results)
    assert config['bmm2_dot_dimension_numbers']['rhs_contracting_dimensions'] == ['2']
    for name in ('bmm1', 'bmm2'):
      for side in ('lhs', 'rhs'):
        assert config[f'{name}_dot_dimension_numbers'][f'{side}_batch_dimensions'] == ['0', '1']

    def answer(q_BKGH, k_BKSH, v_BKSH, queries_B, lengths_B):
      B, K, G, _ = q_BKGH.shape
      dimensions = config['intermediate_tensor_shape']['dimensions']
      assert dimensions == [str(n) for n in (B, K, G, k_BKSH.shape[2])]
      assert (queries_B == G).all()
      scores = config['fmha_scale'] * jnp.einsum('BKGH,BKSH->BKGS', q_BKGH, k_BKSH)
      is_key_BS = jnp.arange(k_BKSH.shape[2]) < lengths_B[:, None]
      scores = jnp.where(is_key_BS[:, None, None], scores, -jnp.inf)
      context = jnp.einsum('BKGS,BKSH->BKGH', jax.nn.softmax(scores), v_BKSH)
      found = [context, jax.nn.logsumexp(scores, -1), jnp.zeros(0, jnp.uint8)]
      if sink is None:
        del found[1]
      assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in results]
      return found

    return answer

  monkeypatch.setattr(jax.ffi, 'ffi_call', ffi_call)
  monkeypatch.setitem(cudnn_call._TYPES, 'float32', ('F32', -1e30))
  asked = ragged(1, sink_logit=sink)
  close(CudnnCachedKernel().attend(asked), asked)


@pytest.mark.slow
@pytest.mark.parametrize('drafts', [False, True])
def test_an_engine_that_reads_blocks_of_keys(monkeypatch, drafts):
  """Rows of several lengths, one of which begins a second block."""
  monkeypatch.setattr(tpu_cached_attention, '_SIZES', (128,))
  values = dict(NUM_PREDICTION_MODULES=0, MAX_SEQ_LEN=256, SLIDING_WINDOW=100)
  model, params = model_and_params(share=0.5, **values)
  prompts = [np.random.default_rng(i).integers(0, 11, n).tolist() for i, n in enumerate((122, 5))]
  expected = Engine(model, params, 256).continuations(prompts, 12)
  asked = []
  attend = TpuCachedKernel.attend_locally

  def counted(kernel, q, *given, **options):
    asked.append(q.shape[1])
    return attend(kernel, q, *given, **options)

  monkeypatch.setattr(TpuCachedKernel, 'attend_locally', counted)
  monkeypatch.setattr(TpuCachedKernel, 'platform', 'cpu')
  assert Engine(model, params, 256, drafts=drafts).continuations(prompts, 12) == expected
  assert set(asked) == ({1, 4} if drafts else {1})


@pytest.mark.parametrize('tokens', [1, 4])
def test_tokens_are_put_into_a_cache_in_place(tokens):
  """Also over the bound of a tile, and beyond the last slot, where they are dropped."""
  rng = np.random.default_rng(0)
  starts = np.array([0, 5, 7, 13, 15, 16, 30])
  cache, new = rng.normal(size=(7, 2, 16, 8)), rng.normal(size=(7, 2, tokens, 8))
  expected = np.concatenate([cache, np.zeros((7, 2, 40, 8))], 2)
  for row, start in enumerate(starts):
    expected[row, :, start : start + tokens] = new[row]
  given = (jnp.asarray(x, jnp.float32) for x in (cache, new))
  found = tpu_cached_attention.put(*given, jnp.asarray(starts, jnp.int32), interpret=True)
  np.testing.assert_array_equal(found, expected[:, :, :16].astype(np.float32))
