"""Keys of windows: of packed texts, in blocks of queries, and those that an indexer chooses."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

from paxlite.experiments.deepseek_v4.windows import (
  KeyCompressor,
  OverlappingKeyCompressor,
  SharedKeyAttention,
  WindowAttention,
  WindowIndexer,
  windows,
)
from paxlite.layers.attention.attention import AttentionSinks

D, H, T, RATE = 6, 4, 24, 3
CUTS = [(0, 7), (7, 8), (8, 15), (15, 22)]  # no start but the first is a multiple of RATE
SIZES = dict(
  model_dims=D, num_heads=4, head_dim=H, query_latent_dims=5, num_groups=2, group_dims=3, rate=RATE
)
INDEXER = functools.partial(
  WindowIndexer, model_dims=D, query_latent_dims=5, num_heads=12, head_dim=H, top_k=2
)


def packed() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns activations of a row, and the segments and positions of its texts and its padding."""
  segments, positions = np.zeros((1, T), np.int32), np.zeros((1, T), np.int32)
  for i, (start, stop) in enumerate(CUTS):
    segments[:, start:stop], positions[:, start:stop] = i + 1, np.arange(stop - start)
  return np.random.default_rng(0).normal(size=(1, T, D)).astype(np.float32), segments, positions


def layer(block_size: int = 0) -> SharedKeyAttention:
  sinks = functools.partial(AttentionSinks, num_heads=4)
  attention = functools.partial(
    WindowAttention, query_scale=0.5, window=4, sinks_tpl=sinks, block_size=block_size
  )
  return SharedKeyAttention(
    **SIZES, attention_tpl=attention, keys_tpl=OverlappingKeyCompressor, selection_tpl=INDEXER
  )


@pytest.fixture(scope='module')
def params():
  x, _, positions = packed()
  made = nn.unbox(jax.jit(layer().init)(jax.random.key(0), x, positions))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda w: w + rng.normal(size=w.shape).astype(np.float32) / 2, made)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [KeyCompressor, OverlappingKeyCompressor])
def test_a_text_has_the_windows_that_it_has_alone(kind):
  x, segments, positions = packed()
  row = windows(RATE, T, positions, segments)
  number = sum((stop - start) // RATE for start, stop in CUTS)
  assert (np.asarray(row.last_BW) < T).sum() == number == 6
  module = kind(model_dims=D, head_dim=H)
  made = nn.unbox(jax.jit(lambda: module.init(jax.random.key(0), x, row))())
  keys = np.asarray(jax.jit(lambda x: module.apply(made, x, row))(x))
  seen = np.asarray(row.visible(T, 0))[0]
  used = 0
  for start, stop in CUTS:
    alone = windows(RATE, stop - start, positions[:, start:stop], None)
    wanted = jax.jit(lambda x, alone=alone: module.apply(made, x, alone))(x[:, start:stop])
    count = (stop - start) // RATE
    np.testing.assert_allclose(keys[:, used : used + count], wanted, atol=1e-6)
    visible = np.asarray(alone.visible(stop - start, 0))[0]
    np.testing.assert_array_equal(seen[start:stop, used : used + count], visible)
    assert seen[start:stop].sum() == visible.sum()  # and no window of another text
    used += count
  assert not seen[CUTS[-1][1] :].any()  # padding


@pytest.mark.slow
def test_attention_of_a_text_is_that_of_the_text_alone(params):
  x, segments, positions = packed()
  attend = jax.jit(layer().apply)
  row = attend(params, x, positions, segments)
  for start, stop in CUTS:
    alone = attend(params, x[:, start:stop], positions[:, start:stop])
    np.testing.assert_allclose(row[:, start:stop], alone, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_blocks_of_queries_compute_the_same(params):
  x, segments, positions = packed()
  for of_segments in (None, segments):
    at = positions if of_segments is not None else np.arange(T)[None]

    def value(params, block_size, at=at, of_segments=of_segments):
      return (layer(block_size).apply(params, x, at, of_segments) ** 2).sum()

    whole, in_blocks = (
      jax.jit(jax.value_and_grad(functools.partial(value, block_size=n)))(params) for n in (T, 4)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-4), *(
      whole, in_blocks
    ))  # fmt: skip


@pytest.mark.slow
def test_a_query_sees_the_windows_that_are_chosen():
  x, segments, positions = packed()
  latent = np.random.default_rng(2).normal(size=(1, T, 5)).astype(np.float32)
  of = windows(RATE, T, positions, segments)
  visible = of.visible(T, 0)
  arguments = x, latent, positions, of, visible
  indexer = INDEXER(keys_tpl=OverlappingKeyCompressor)
  made = nn.unbox(jax.jit(lambda: indexer.init(jax.random.key(0), *arguments))())
  chosen = np.asarray(jax.jit(lambda: indexer.apply(made, *arguments))())
  assert not (chosen & ~np.asarray(visible)).any()
  np.testing.assert_array_equal(chosen.sum(-1), np.minimum(np.asarray(visible).sum(-1), 2))
  total = lambda x: indexer.apply(made, x, *arguments[1:]).astype(float).sum()
  grads = jax.jit(jax.grad(total))(x)
  assert not np.asarray(grads).any()
