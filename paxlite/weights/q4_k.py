"""4-bit blocks of llama.cpp's type Q4_K, which the package gguf can only decode.

A block has 256 elements of a row: 8 parts of 32. An element is d·s·q − d'·m, where q is a number of
4 bits, s and m are numbers of 6 bits for each part, and d and d' are float16 for each block. The
layout of the 144 bytes is that of `block_q4_K` in ggml's ggml-common.h:

d, d' [2 + 2 bytes], s and m [12 bytes], q [128 bytes: two parts share 32 bytes]
"""

import numpy as np

BLOCK, BYTES = 256, 144
_PARTS, _WIDTH = 8, 32
_LARGEST, _LARGEST_SCALE = 15, 63
# Shares of the range of a part that its 16 levels may span: outliers cost less than coarse steps.
_SHARES = np.linspace(0.7, 1.1, 15, dtype=np.float32)


def encode(rows: np.ndarray) -> np.ndarray:
  """Returns the bytes [..., n / 256 · 144] of rows [..., n], float32; n is a multiple of 256."""
  x_BPW = np.ascontiguousarray(rows, np.float32).reshape(-1, _PARTS, _WIDTH)
  scale_BP, minimum_BP = _levels(x_BPW)
  d_B1, s_BP = _six_bits(scale_BP)
  dm_B1, m_BP = _six_bits(minimum_BP)
  step_BP1 = (d_B1 * s_BP)[..., None]
  shifted = x_BPW + (dm_B1 * m_BP)[..., None]
  q_BPW = np.divide(shifted, step_BP1, out=np.zeros_like(shifted), where=step_BP1 > 0)
  q_BPW = np.clip(np.rint(q_BPW), 0, _LARGEST).astype(np.uint8)
  s_BP, m_BP = s_BP.astype(np.uint8), m_BP.astype(np.uint8)
  low, high = slice(0, 4), slice(4, 8)
  packed = [
    d_B1.astype(np.float16).view(np.uint8), dm_B1.astype(np.float16).view(np.uint8),
    s_BP[:, low] | s_BP[:, high] >> 4 << 6, m_BP[:, low] | m_BP[:, high] >> 4 << 6,
    s_BP[:, high] & 15 | (m_BP[:, high] & 15) << 4,
    (q_BPW[:, 0::2] | q_BPW[:, 1::2] << 4).reshape(-1, BLOCK // 2),
  ]  # fmt: skip
  blocks = np.concatenate(packed, axis=1)
  return blocks.reshape(*rows.shape[:-1], rows.shape[-1] // BLOCK * BYTES)


def _levels(x_BPW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the step and the minimum, [B, P], with which the levels of each part are closest to it.

  The minimum is what is taken away, at least 0. For several steps, elements are rounded to levels,
  and least squares give the step and the minimum that fit these levels best; and both once more.
  """
  low = np.minimum(x_BPW.min(-1), 0)
  span = x_BPW.max(-1) - low
  best = np.full(span.shape, np.inf, np.float32)
  step, minimum = np.zeros_like(span), -low
  for share in _SHARES:
    s, m = span * share / _LARGEST, -low
    for _ in range(2):
      inverse = np.divide(1, s, out=np.zeros_like(s), where=s > 0)
      q = np.clip(np.rint((x_BPW + m[..., None]) * inverse[..., None]), 0, _LARGEST)
      s, m = _fit(x_BPW, q)
    error = ((s[..., None] * q - m[..., None] - x_BPW) ** 2).sum(-1)
    better = error < best
    best = np.where(better, error, best)
    step, minimum = np.where(better, s, step), np.where(better, m, minimum)
  return step, minimum


def _fit(x: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns s and m ≥ 0 for which the sum of (s·q − m − x)² over the last dimension is least."""
  q_mean, x_mean = q.mean(-1), x.mean(-1)
  spread = (q * q).mean(-1) - q_mean * q_mean
  shared = (q * x).mean(-1) - q_mean * x_mean
  s = np.divide(shared, spread, out=np.zeros_like(spread), where=spread > 0)
  m = s * q_mean - x_mean
  # where the minimum would be below 0, the line goes through 0
  squares = (q * q).sum(-1)
  through = np.divide((q * x).sum(-1), squares, out=np.zeros_like(squares), where=squares > 0)
  return np.maximum(np.where(m < 0, through, s), 0), np.maximum(m, 0)


def _six_bits(values_BP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns d [B, 1], rounded to float16, and whole numbers [B, P] whose products are `values`."""
  d_B1 = values_BP.max(-1, keepdims=True) / _LARGEST_SCALE
  d_B1 = d_B1.astype(np.float16).astype(np.float32)
  exact = np.divide(values_BP, d_B1, out=np.zeros_like(values_BP), where=d_B1 > 0)
  return d_B1, np.clip(np.rint(exact), 0, _LARGEST_SCALE)
