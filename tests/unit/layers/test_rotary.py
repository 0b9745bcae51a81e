"""Rotary embeddings as a TPU computes them are those of other devices, gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import rotary
from paxlite.layers.rotary import Llama3RotaryEmbedding, RotaryEmbedding


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('cls', [RotaryEmbedding, Llama3RotaryEmbedding])
@pytest.mark.parametrize('layout', ['interleaved', 'half'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_tpus_way_gives_the_same_bits(monkeypatch, cls, layout, dtype):
  x = jax.random.normal(jax.random.key(0), (2, 16, 3, 8), dtype)
  weights = jax.random.normal(jax.random.key(1), x.shape, dtype)
  positions = jnp.stack([jnp.arange(16), jnp.arange(16) % 5])

  def computed(platform):
    monkeypatch.setattr(rotary, 'active_platform', lambda: platform)
    value = lambda x: cls(layout=layout).apply({}, x, positions)
    y, transpose = jax.vjp(value, x)
    return y, transpose(weights)[0]

  for ours, theirs in zip(computed('tpu'), computed('gpu'), strict=True):
    assert ours.dtype == dtype
    np.testing.assert_array_equal(ours, theirs)
