"""How much better an episode was than others of its group."""

from typing import Literal

import numpy as np

Scale = Literal['group', 'batch', 'none']


def filled(rewards_GN: np.ndarray) -> np.ndarray:
  """Returns rewards with the mean of its group, or 0, in the place of each one that is NaN."""
  known_GN = ~np.isnan(rewards_GN)
  sums_G1 = np.where(known_GN, rewards_GN, 0).sum(1, keepdims=True)
  return np.where(known_GN, rewards_GN, sums_G1 / np.maximum(known_GN.sum(1, keepdims=True), 1))


def advantages(rewards_GN: np.ndarray, scale: Scale) -> np.ndarray:
  """Returns rewards minus the mean of their group, [G, N], over a standard deviation.

  Args:
    rewards_GN: The rewards of N episodes of each of G prompts.
    scale: Divides by the standard deviation of a group (https://arxiv.org/abs/2402.03300,
      section 4.1.2), or of all groups, or by nothing (https://arxiv.org/abs/2503.20783).
  """
  centred_GN = rewards_GN - rewards_GN.mean(1, keepdims=True)
  if scale == 'none':
    return centred_GN
  # of a sample, as in trl
  axis = 1 if scale == 'group' else None
  return centred_GN / (rewards_GN.std(axis, ddof=1, keepdims=True) + 1e-4)
