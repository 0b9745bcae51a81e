"""Streams of activations: how layers read, write and mix them."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from paxlite.experiments.deepseek_v4.blocks import (
  EqualStreams,
  HyperConnection,
  MergedStreams,
  balanced,
)

B, T, N, D = 2, 3, 4, 5


def streams() -> np.ndarray:
  return np.random.default_rng(0).normal(size=(B, T, N, D)).astype(np.float32)


def test_rows_and_columns_of_the_mixing_matrix_sum_to_1():
  found = np.asarray(balanced(np.exp(streams()[..., :N]), 20, 1e-6))
  np.testing.assert_allclose(found.sum(-2), 1, atol=1e-5)
  np.testing.assert_allclose(found.sum(-1), 1, atol=1e-3)
  once = np.asarray(balanced(np.exp(streams()[..., :N]), 1, 1e-6))
  assert np.abs(once.sum(-1) - 1).max() > 0.1


@pytest.mark.slow
def test_a_layer_reads_a_weighted_sum_and_writes_into_each_stream():
  x, h = streams(), streams()[:, :, 0] + 1
  params = nn.unbox(jax.jit(HyperConnection().init)(jax.random.key(0), x))
  params = jax.tree.map(lambda w: w + 0.3, params)
  connection = jax.jit(HyperConnection().apply)(params, x)
  found = np.asarray(connection.joined(x, h))
  write, mix = np.asarray(connection.write_BTN), np.asarray(connection.mix_BTNN)
  wanted = write[..., None] * h[:, :, None]
  for old in range(N):
    wanted = wanted + mix[:, :, old, :, None] * x[:, :, old, None]
  np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_untrained_connections_treat_equal_streams_alike():
  x = streams()[:, :, 0]
  equal = EqualStreams(N).apply({}, x, None, None)
  assert equal.shape == (B, T, N, D)
  params = nn.unbox(MergedStreams().init(jax.random.key(0), equal, None, None))
  assert params['params']['weights']['w'].shape == (N, N, D)
  zero = jax.tree.map(np.zeros_like, params)
  merged = MergedStreams().apply(zero, equal, None, None)
  np.testing.assert_allclose(merged, N * x / 2, rtol=1e-4)
