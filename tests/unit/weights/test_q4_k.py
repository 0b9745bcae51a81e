"""Blocks of type Q4_K: the package gguf decodes what paxlite encodes."""

import numpy as np
import pytest

from paxlite.weights import gguf_types, q4_k

gguf = pytest.importorskip('gguf')


def decoded(stored: np.ndarray) -> np.ndarray:
  return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_K)


def rows(kind: str) -> np.ndarray:
  rng = np.random.default_rng(0)
  drawn = {
    'normal': rng.normal(size=(8, 512)), 'small': rng.normal(size=(8, 256)) * 1e-3,
    'above 0': rng.uniform(1, 2, (4, 256)), 'below 0': -rng.uniform(1, 2, (4, 256)),
    'outliers': rng.standard_t(2, (8, 256)),
    'parts of many sizes': rng.normal(size=(8, 8, 32)) * 2.0 ** np.arange(8)[:, None],
  }  # fmt: skip
  return drawn[kind].reshape(drawn[kind].shape[0], -1).astype(np.float32)


@pytest.mark.parametrize(
  'kind', ['normal', 'small', 'above 0', 'below 0', 'outliers', 'parts of many sizes']
)
def test_an_element_is_within_the_step_of_its_part(kind):
  """Levels are a 15th of the range of a part apart, which includes 0, and scales have 6 bits."""
  x = rows(kind)
  stored = q4_k.encode(x)
  assert stored.shape == (len(x), x.shape[1] // 256 * 144)
  assert stored.dtype == np.uint8
  parts = x.reshape(-1, 8, 32)
  span = np.maximum(parts.max(-1), 0) - np.minimum(parts.min(-1), 0)
  bound = span / 30 + span.max(-1, keepdims=True) / 63
  error = np.abs(decoded(stored).reshape(parts.shape) - parts)
  # outliers may be cut, where that serves the other elements
  assert (np.median(error, -1) <= bound).all()
  assert (error.max(-1) <= 0.35 * span + bound).all()


def test_the_fit_is_better_than_the_plain_range():
  """Root mean square error of normal numbers; 16 levels over the whole range have 0.079."""
  x = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
  assert np.sqrt(np.mean((decoded(q4_k.encode(x)) - x) ** 2)) < 0.072


def test_constants_and_zeros():
  for value in (0.0, 0.3, -0.3):
    x = np.full((2, 256), value, np.float32)
    np.testing.assert_allclose(decoded(q4_k.encode(x)), x, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
  ('name', 'shape', 'wanted', 'expected'),
  [
    ('blk.0.attn_q.weight', (8, 512), 'q4_k', 'q4_k'),
    ('blk.0.attn_q.weight', (8, 576), 'q4_k', 'q8_0'),
    ('blk.0.attn_q.weight', (8, 40), 'q4_k', 'f16'),
    ('blk.0.attn_q.weight', (8, 40), 'q8_0', 'f16'),
    ('blk.0.attn_q.weight', (8, 40), 'bf16', 'bf16'),
    ('blk.0.attn_norm.weight', (512,), 'q4_k', 'f32'),
    ('blk.0.ffn_gate_inp.weight', (8, 512), 'q4_k', 'f32'),
    ('blk.0.ffn_up_exps.weight', (4, 8, 512), 'q4_k', 'q4_k'),
  ],
)
def test_types_of_tensors(name, shape, wanted, expected):
  assert gguf_types.chosen(name, shape, wanted) == expected


@pytest.mark.parametrize('kind', gguf_types.TYPES)
def test_the_bytes_have_the_shape_that_the_header_states(kind):
  x = rows('normal')
  assert gguf_types.encoded(x, kind).shape == gguf_types.byte_shape(x.shape, kind)
