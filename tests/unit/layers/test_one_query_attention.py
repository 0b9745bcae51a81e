"""Attention of one query equals attention in plain XLA, with all that a model may ask for."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers.attention import attention_kernels, softmax_attention
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.one_query_attention import OneQueryKernel
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax

B, S, N, H = 2, 12, 4, 8
INDEX = 9  # of the query; later keys are room
STARTS = np.array([3, 0])


def case(
  key_heads: int = N, width: int = H, bias: bool = False, window: int = 0, **softmax
) -> Case:
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  of_keys = jnp.asarray(np.arange(S) >= STARTS[:, None], jnp.int32)
  return Case(
    drawn(B, 1, N, H), drawn(B, S, key_heads, H), drawn(B, S, key_heads, width),
    Softmax(0.3, window=window, **softmax),
    AttentionMask(INDEX, window, (jnp.ones((B, 1), jnp.int32), of_keys)),
    bias=drawn(1, N, 1, S) if bias else None,
  )  # fmt: skip


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize(
  'given',
  [
    {},
    {'key_heads': 2},
    {'key_heads': 1, 'width': 5},  # as with latents
    {'logit_cap': 0.5},
    {'sink_logit': 0.7},
    {'sink_logit': jnp.arange(4.0)},
    {'window': 4},
    {'window': 3},  # the keys before it are not read
    {'window': 3, 'bias': True, 'key_heads': 2, 'sink_logit': 0.7},
    {'bias': True},
  ],
  ids=str,
)
def test_it_is_attention(given):
  asked = case(**given)
  assert isinstance(attention_kernels.first(asked), OneQueryKernel)
  arrays = *asked.arrays, asked.visible.mask(1, S), asked.bias
  expected = softmax_attention.attend(*arrays, asked.softmax)
  found = OneQueryKernel().attend(asked)
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize('key', [INDEX, INDEX - 1])
def test_a_nan_among_the_visible_keys_reaches_the_context(key):
  asked = case()
  k = asked.k.at[1, key, 0, 0].set(np.nan)
  found = OneQueryKernel().attend(Case(asked.q, k, asked.v, asked.softmax, asked.visible))
  assert np.isnan(found[1, 0, 0]).all()
  assert np.isfinite(found[0]).all()


@pytest.mark.parametrize('index', [0, 1, S - 1])
def test_a_small_window_at_either_end_of_the_cache(index):
  asked = dataclasses.replace(case(window=3), visible=AttentionMask(index, 3))
  arrays = *asked.arrays, asked.visible.mask(1, S), None
  expected = softmax_attention.attend(*arrays, asked.softmax)
  np.testing.assert_allclose(OneQueryKernel().attend(asked), expected, rtol=2e-5, atol=1e-6)
