"""Losses of pairs: rows that fill up a batch, and pairs that lie anywhere in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.finetuning.preferences.preference_losses import ChosenLoss, SimPo, of_pairs


class Answers:
  """Outputs whose probabilities of tokens are given."""

  def __init__(self, log_probs):
    self.log_probs = jnp.asarray(log_probs)
    self.tokens = type('Tokens', (), {'xent': -self.log_probs})


def batch_of(segments, weights):
  segments = np.asarray(segments, np.int32)
  signs = np.where(segments % 2 == 1, 1, -1) * (segments > 0)
  arrays = dict(segment_ids=segments, preferences=signs, weights=np.asarray(weights, np.float32))
  return {k: jnp.asarray(v) for k, v in arrays.items()}


SEGMENTS = [[1, 1, 1, 2, 2, 3, 4, 4, 0, 0], [1, 1, 2, 2, 2, 2, 0, 0, 0, 0]]
WEIGHTS = [[0, 1, 1, 1, 1, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 1, 0, 0, 0, 0]]


def test_sums_of_both_answers_of_each_pair():
  rng = np.random.default_rng(0)
  values = rng.normal(size=(2, 10)).astype(np.float32)
  found = jax.jit(of_pairs)(jnp.asarray(values), batch_of(SEGMENTS, WEIGHTS))
  weighted = values * np.asarray(WEIGHTS)
  expected = {  # the last token of each pair
    (0, 4): (weighted[0, :3].sum(), weighted[0, 3:5].sum()),
    (0, 7): (weighted[0, 5], weighted[0, 6:8].sum()),
    (1, 5): (weighted[1, :2].sum(), weighted[1, 2:6].sum()),
  }
  assert set(zip(*np.nonzero(np.asarray(found.is_last)), strict=True)) == set(expected)
  for place, sums in expected.items():
    np.testing.assert_allclose((found.chosen[place], found.rejected[place]), sums, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('loss', [SimPo(), ChosenLoss()])
def test_copies_of_rows_that_fill_up_an_evaluation_do_not_count(loss):
  """They have segments and no weights."""
  values = -np.random.default_rng(0).uniform(0.1, 2, (2, 10)).astype(np.float32)
  once, doubled = batch_of(SEGMENTS, WEIGHTS), batch_of(SEGMENTS * 2, WEIGHTS + [[0] * 10] * 2)
  value = jax.jit(lambda log_probs, batch: loss(Answers(log_probs), batch))
  for one, two in (
    (loss.weight(once), loss.weight(doubled)),
    (value(values, once), value(np.tile(values, (2, 1)), doubled)),
  ):
    assert float(one) == pytest.approx(float(two), rel=1e-6)
  assert float(loss.weight(once)) == (3 if isinstance(loss, SimPo) else 6)
