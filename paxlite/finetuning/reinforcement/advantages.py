"""How much better an episode was than others of its group."""

from typing import Literal

import numpy as np

Scale = Literal['group', 'batch', 'none']
Credit = Literal['episode', 'turn']


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


def turn_advantages(rewards_GNK: np.ndarray, scale: Scale) -> np.ndarray:
  """Returns how much better each turn and those after it were than turns of their group, [G, N, K].

  The normalized rewards of a turn and of all later ones are added, as in the process supervision of
  https://arxiv.org/abs/2402.03300, section 4.1.3. With one turn each these are `advantages`.

  Args:
    rewards_GNK: The rewards of up to K turns of each episode; NaN after its last turn, where the
      result is 0.
    scale: Divides by the standard deviation of all turns of a group, or of all groups, or by
      nothing.
  """
  is_turn_GNK = ~np.isnan(rewards_GNK)
  known_GNK = np.where(is_turn_GNK, rewards_GNK, 0)

  def mean(values_GNK: np.ndarray, axes: tuple[int, ...], ddof: int = 0) -> np.ndarray:
    count = is_turn_GNK.sum(axes, keepdims=True) - ddof
    return values_GNK.sum(axes, keepdims=True) / np.maximum(count, 1)

  centred_GNK = np.where(is_turn_GNK, known_GNK - mean(known_GNK, (1, 2)), 0)
  if scale != 'none':
    axes = (1, 2) if scale == 'group' else (0, 1, 2)
    squares_GNK = np.where(is_turn_GNK, known_GNK - mean(known_GNK, axes), 0) ** 2
    centred_GNK = centred_GNK / (np.sqrt(mean(squares_GNK, axes, ddof=1)) + 1e-4)
  to_go_GNK = np.flip(np.flip(centred_GNK, 2).cumsum(2), 2)
  return np.where(is_turn_GNK, to_go_GNK, 0)
