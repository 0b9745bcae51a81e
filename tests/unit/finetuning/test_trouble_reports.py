"""Trouble that users of other libraries have reported, and what happens here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.finetuning.distillation.distillation_losses import (
  AnswersDivergence,
  divergence,
  of_tokens,
)
from paxlite.finetuning.reinforcement.advantages import advantages, filled
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.layers.language_model import LogitFactors
from tests.unit.finetuning.test_judges import PATH, episode


def test_a_reward_of_another_count_is_not_broadcast():
  """github.com/huggingface/trl/issues/6533: [1.0] silently became the reward of all answers."""
  of = Judges([f'{PATH}.odd'], [1.0], seconds=5.0)
  with pytest.raises(
    UserError, match=r'returned \[1\.0\] for a\.jsonl:1 .*must be a finite number'
  ):
    of.rewards([episode({}, answer) for answer in ('a number', 'a list', 'a number')])


def test_a_reward_that_is_missing_spoils_no_advantage():
  """github.com/modelscope/ms-swift/issues/8123 and huggingface/trl/issues/4501: one None or NaN
  made all advantages NaN, and training went on without learning anything."""
  of = Judges([f'{PATH}.odd'], [1.0], seconds=5.0)
  for kind, said in (('none', 'returned None'), ('NaN', 'returned nan')):
    with pytest.raises(UserError, match=said):
      of.rewards([episode({}, 'a number'), episode({}, kind)])
  environment = Judges([], [], environment=f'{PATH}.Faulty', seconds=5.0)
  faults = [None, 'is NaN', None, 'is None', *['is NaN'] * 3, None]
  rewards = environment.rewards([episode({'reward': fault}) for fault in faults])
  for scale in ('group', 'batch', 'none'):
    found = advantages(filled(rewards.reshape(2, 4)), scale)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-6)


def test_a_reward_that_cannot_be_interrupted_is_killed_and_may_use_signals():
  """github.com/huggingface/Math-Verify/issues/65 and verl-project/verl/pull/5839: rewards hung for
  ever in spite of their own limits, which failed in threads."""
  of = Judges([f'{PATH}.odd'], [1.0], seconds=1.0)
  assert of.rewards([episode({}, 'bounds itself')]).tolist() == [0.25]
  with pytest.raises(UserError, match='did not finish within 1 seconds'):
    of.rewards([episode({}, 'ignores exceptions')])
  assert of.rewards([episode({}, 'bounds itself')]).tolist() == [0.25]


class _Models:
  has_reference = True

  def __init__(self, logits, reference=None):
    size = logits.shape[-1]
    self.logit_factors = LogitFactors(jnp.asarray(logits), jnp.eye(size), None, 0.0)
    self.reference = reference

  def once(self, key, compute):
    return compute()


@pytest.mark.parametrize('kind', ['forward', 'reverse', 'jensen_shannon'])
def test_vocabularies_that_are_padded_differently_are_compared(kind):
  """github.com/huggingface/trl/issues/2215: Qwen2.5's sizes 151,936 and 152,064 did not fit."""
  rng = np.random.default_rng(0)
  ours, theirs = rng.normal(size=(2, 2, 3, 16)).astype(np.float32)
  batch = {'weights': jnp.ones((2, 3))}
  loss = AnswersDivergence(kind=kind)
  expected = loss(_Models(ours[..., :12], _Models(theirs[..., :12])), batch)
  for left, right in ((12, 16), (16, 12)):
    found = loss(_Models(ours[..., :left], _Models(theirs[..., :right])), batch)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize('kind', ['forward', 'reverse', 'jensen_shannon'])
def test_a_divergence_of_likely_tokens_is_never_negative(kind):
  """github.com/verl-project/verl/issues/7239: without the other tokens' share, sums of top-k tokens
  are no divergence, may be negative, and had to be clamped."""
  rng = np.random.default_rng(1)
  for size in (0.1, 1, 10):
    ours, theirs = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, 400, 50)) * size)
    whole = divergence(kind, jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs))
    for k in (1, 5, 49):
      _, ids = jax.lax.top_k(theirs, k)
      found = divergence(kind, of_tokens(ours, ids), of_tokens(theirs, ids))
      assert (found > -1e-6 * size).all()
      assert (found <= whole + 1e-5 * (1 + whole)).all()
