"""Advantages are rewards beside those of their group."""

import numpy as np
import pytest

from paxlite.finetuning.reinforcement.advantages import advantages


@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
def test_advantages(scale):
  rewards = np.array([[0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 4.0]])
  found = advantages(rewards, scale)
  np.testing.assert_allclose(found.mean(1), 0, atol=1e-12)
  assert not found[1].any()  # nothing is learned where all are equal
  centred = rewards - rewards.mean(1, keepdims=True)
  by = {'group': rewards.std(1, ddof=1, keepdims=True), 'batch': rewards.std(ddof=1), 'none': 1.0}
  divisor = by[scale] + (1e-4 if scale != 'none' else 0)
  np.testing.assert_allclose(found, centred / divisor)
