"""Splash's masks are those of JAX."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

from paxlite.layers.attention import splash_mask

SHAPES = [(1024, 1024), (512, 1024)]
PAIRS = [(splash_mask.CausalMask(shape), masks.CausalMask(shape)) for shape in SHAPES] + [
  (splash_mask.LocalMask(shape, window), masks.LocalMask(shape, (window - 1, 0), 0))
  for shape in SHAPES
  for window in (1, 100, 128, 129, 384, 2048)
]


@pytest.mark.parametrize(('ours', 'theirs'), PAIRS)
def test_every_block(ours, theirs):
  for i in range(0, ours.shape[0], 128):
    for j in range(0, ours.shape[1], 64):
      block = slice(i, i + 128), slice(j, j + 64)
      np.testing.assert_array_equal(ours[block], theirs[block])


@pytest.mark.parametrize(('ours', 'theirs'), PAIRS)
@pytest.mark.parametrize('is_backward', [False, True])
def test_what_splash_makes_of_them(ours, theirs, is_backward):
  process = infos.process_mask_dkv if is_backward else infos.process_mask
  of = lambda mask: process(masks.MultiHeadMask([mask] * 2), (128, 128))[0]
  jax.tree.map(np.testing.assert_array_equal, of(ours), of(theirs))


def test_most_blocks_are_not_computed(monkeypatch):
  computed = []
  of_block = masks.CausalMask.__getitem__
  count = lambda self, index: computed.append(index) or of_block(self, index)
  monkeypatch.setattr(masks.CausalMask, '__getitem__', count)
  infos.process_mask(masks.MultiHeadMask([splash_mask.CausalMask((4096, 4096))]), (128, 128))
  assert len(set(map(str, computed))) == 32
