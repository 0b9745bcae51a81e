"""A form of frozen weights that is written outside of the package."""

import jax
import numpy as np
import pytest

from tests.outside.parts.four_bits import FourBits
from tests.outside.trained import trained, trained_on_one

PART = 'four_bits.TinyLoRA'


def test_two_values_in_a_byte():
  w = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
  arrays = jax.device_get(FourBits().encode(w, (0,)))
  assert {k: (v.dtype.name, v.shape) for k, v in arrays.items()} == {
    'bytes': ('uint8', (8, 3)), 'scale': ('float32', (1, 6)),
  }  # fmt: skip
  decoded = np.asarray(FourBits().decode(arrays, w.shape))
  assert np.abs(decoded - w).max() <= arrays['scale'].max() / 2 * 1.0001


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(tmp_path):
  many = trained(tmp_path / 'many', PART, '--fdl.PERCORE_BATCH_SIZE=1')
  one = trained_on_one(tmp_path / 'one', PART, 8)
  assert many == pytest.approx(one, rel=1e-4)
  assert len(set(one.values())) == len(one)
