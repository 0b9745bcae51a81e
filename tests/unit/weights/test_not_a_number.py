"""Weights that are not numbers."""

import ml_dtypes
import numpy as np
import pytest

from paxlite.weights.folder import has_nan


@pytest.mark.parametrize('dtype', [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize('seed', range(3))
def test_one_number_that_is_none_is_found(dtype, seed):
  rng = np.random.default_rng(seed)
  value = rng.normal(size=(7, 5, 3)).astype(dtype)
  value[0, 0] = np.array([np.inf, -np.inf, np.finfo(np.float16).max], dtype)
  assert not has_nan(value)
  assert not has_nan(np.zeros((0, 2), dtype))
  value[tuple(rng.integers(1, n) for n in value.shape)] = rng.choice([-1, 1]) * np.nan
  assert has_nan(value)
  assert has_nan(value.transpose(2, 0, 1))
