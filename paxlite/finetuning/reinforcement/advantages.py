"""How much better an episode was than others of its group."""

from typing import Literal

import numpy as np

Scale = Literal['group', 'batch', 'none']
Credit = Literal['episode', 'turn']


def filled(rewards_GN: np.ndarray) -> np.ndarray:
  """Returns rewards with the mean of its group, or 0, in the place of each one that is NaN."""
  known_GN = ~np.isnan(rewards_GN)
  sums_G1 = np.where(known_GN, rewards_GN, 0).sum(1, keepdims=True)
  means_G1 = sums_G1 / np.maximum(known_GN.sum(1, keepdims=True), 1)
  # in their own dtype: advantages of float64 would round otherwise
  return np.where(known_GN, rewards_GN, means_G1.astype(rewards_GN.dtype))


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


def turn_advantages(
  turns_GNK: np.ndarray, outcomes_GN: np.ndarray, answers_GN: np.ndarray, scale: Scale
) -> np.ndarray:
  """Returns how much more each turn and those after it earned than those of its group, [G, N, K].

  From the rewards to go, which include the outcome, the mean of all episodes that reached this turn
  is subtracted: a baseline that knows nothing of the answer (https://arxiv.org/abs/1506.02438,
  section 2). With one turn each these are `advantages`. The process supervision of
  https://arxiv.org/abs/2402.03300, section 4.1.3, subtracts a mean from the reward of each turn
  instead. How often then depends on when an episode ends, so that it teaches to end early or late.

  Args:
    turns_GNK: The rewards of up to K turns of each episode, and 0 after its last one.
    outcomes_GN: The parts of rewards that no turn has.
    answers_GN: The number of turns of each episode; 0: it failed, and counts for nothing.
    scale: Divides by the standard deviation of a group, from these means, or of all rewards to go
      of a batch, or by nothing.
  """
  is_turn_GNK = np.arange(turns_GNK.shape[2]) < answers_GN[..., None]
  to_go_GNK = outcomes_GN[..., None] + np.flip(np.flip(turns_GNK, 2).cumsum(2), 2)
  to_go_GNK = np.where(is_turn_GNK, to_go_GNK, 0)
  means_G1K = to_go_GNK.sum(1, keepdims=True) / np.maximum(is_turn_GNK.sum(1, keepdims=True), 1)
  centred_GNK = np.where(is_turn_GNK, to_go_GNK - means_G1K, 0)
  if scale == 'none':
    return centred_GNK
  if scale == 'batch':
    return centred_GNK / (to_go_GNK[is_turn_GNK].std(ddof=1) + 1e-4)
  count_G11 = np.maximum(is_turn_GNK.sum((1, 2), keepdims=True) - 1, 1)
  return centred_GNK / (np.sqrt((centred_GNK**2).sum((1, 2), keepdims=True) / count_G11) + 1e-4)
