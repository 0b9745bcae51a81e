"""Advantages are rewards beside those of their group."""

import itertools

import numpy as np
import pytest

from paxlite.finetuning.reinforcement.advantages import advantages, turn_advantages


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


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
def test_turns_get_their_rewards_to_go_less_the_mean_of_those_that_got_as_far(scale, seed):
  rng = np.random.default_rng(seed)
  G, N, K = 3, 4, 5
  answers = rng.integers(0, K + 1, (G, N))
  outcomes = rng.normal(size=(G, N))
  turns = rng.normal(size=(G, N, K)) * (np.arange(K) < answers[..., None])
  found = turn_advantages(turns, outcomes, answers, scale)
  to_go = {
    (g, n, k): outcomes[g, n] + turns[g, n, k:].sum()
    for g, n, k in np.ndindex(G, N, K)
    if k < answers[g, n]
  }
  expected = np.zeros((G, N, K))
  for (g, n, k), value in to_go.items():
    of_turn = [to_go[g, m, k] for m in range(N) if (g, m, k) in to_go]
    expected[g, n, k] = value - np.mean(of_turn)
  if scale == 'batch':
    expected /= np.std([*to_go.values()], ddof=1) + 1e-4
  if scale == 'group':
    for g in range(G):
      count = answers[g].sum()
      expected[g] /= np.sqrt((expected[g] ** 2).sum() / max(count - 1, 1)) + 1e-4
  np.testing.assert_allclose(found, expected, atol=1e-12)
  rewards = rng.normal(size=(G, N))
  one = turn_advantages(rewards[..., None] / 2, rewards / 2, np.ones((G, N), int), scale)
  np.testing.assert_allclose(one[..., 0], advantages(rewards, scale), atol=1e-12)


@pytest.mark.parametrize('early', [0.0, 1.0, -2.0])
def test_where_going_on_earns_nothing_it_is_neither_learned_nor_unlearned(early):
  """As in https://github.com/verl-project/verl/issues/7244: a mean for each turn is a price.

  The first answer earns `early`, and ends the episode or goes on to one that earns nothing. The
  expectation of the gradient in the logit of going on is summed over all groups of three episodes.
  """
  going_on = 0.3
  gradients = {'to_go': 0.0, 'process': 0.0}
  for goes in itertools.product([0, 1], repeat=3):
    probability = np.prod([going_on if g else 1 - going_on for g in goes])
    answers = np.array([goes]) + 1
    turns = np.array([[[early, 0.0]] * 3])
    found = turn_advantages(turns, np.zeros((1, 3)), answers, 'none')
    is_turn = np.arange(2) < answers[..., None]
    centred = np.where(is_turn, turns - turns[is_turn].mean(), 0)
    score = np.array([g - going_on for g in goes])  # the gradient of the log-probability
    gradients['to_go'] += probability * (score * found[0, :, 0]).sum()
    gradients['process'] += probability * (score * centred.sum(2)[0]).sum()
  assert abs(gradients['to_go']) < 1e-12
  assert abs(gradients['process']) > 0.05 or early == 0
