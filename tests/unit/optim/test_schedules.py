"""Schedules of the learning rate that Pax does not have, beside those of transformers."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.optim import schedules


def rates(schedule, steps):
  return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)))


@pytest.mark.slow
def test_schedules_are_those_of_transformers():
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')

  def theirs(name, **values):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = transformers.get_scheduler(name, optimizer, **values)
    found = []
    for _ in range(30):
      found.append(schedule.get_last_lr()[0])
      optimizer.step()
      schedule.step()
    return found

  same = lambda ours, found: np.testing.assert_allclose(
    rates(ours, 30), found, rtol=1e-5, atol=1e-7
  )
  same(schedules.linear(0.5, 4, 24), theirs('linear', num_warmup_steps=4, num_training_steps=24))
  same(schedules.inverse_sqrt(0.5, 4), theirs('inverse_sqrt', num_warmup_steps=4))
  steps = dict(num_stable_steps=10, num_decay_steps=8)
  for shape in ('linear', 'cosine'):
    for ratio in (0.0, 0.1):
      kind = dict(decay_type=shape, min_lr_ratio=ratio)
      ours = rates(schedules.warmup_stable_decay(0.5, 4, 8, [22], ratio, shape), 30)
      expected = theirs(
        'warmup_stable_decay', num_warmup_steps=4, scheduler_specific_kwargs=steps | kind
      )
      first = 4 if ratio else 0  # theirs begins with the ratio, and not with 0
      np.testing.assert_allclose(ours[first:], expected[first:], rtol=1e-5, atol=1e-7)


def test_a_decayed_run_goes_on_at_the_full_rate():
  found = rates(schedules.warmup_stable_decay(1.0, 2, 4, [8, 14], shape='1-sqrt'), 16)
  down = 1 - np.sqrt([0, 0.25, 0.5, 0.75, 1])
  expected = [0, 0.5, 1, 1, *down, 1, *down, 0]
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_attributes_choose_a_schedule_and_wrong_ones_are_refused():
  values = dict(LR_SCHEDULE='warmup_stable_decay', MAX_STEPS=50, LEARNING_RATE=2.0, LR_WARMUP=5)
  e = TinyGPT(**values)
  e.validate()
  found = rates(fdl.build(e.schedule()), 51)
  np.testing.assert_allclose(found[[5, 40, 45, 50]], [2, 2, 1, 0], atol=1e-6)
  with pytest.raises(
    UserError, match=r'LR_DECAY_ENDS=\[50, 55\] must be at least LR_DECAY_STEPS=10'
  ):
    TinyGPT(**values, LR_DECAY_ENDS=[50, 55]).validate()
  with pytest.raises(UserError, match='needs one step in LR_DECAY_ENDS'):
    TinyGPT(LR_SCHEDULE='linear', LR_DECAY_ENDS=[10, 20]).validate()
  with pytest.raises(UserError, match='inverse_sqrt needs LR_WARMUP of at least 1'):
    TinyGPT(LR_SCHEDULE='inverse_sqrt').validate()
  (warning,) = [w for w in TinyGPT(LR_SCHEDULE='linear', MAX_STEPS=9, LR_WARMUP=10,
                                   LR_DECAY_ENDS=[20]).warnings if 'LR_WARMUP' in w]  # fmt: skip
  assert 'the learning rate never reaches LEARNING_RATE' in warning
  early = TinyGPT(LR_SCHEDULE='linear', MAX_STEPS=9, LR_DECAY_ENDS=[5]).warnings
  assert any('all steps after them have 0 × LEARNING_RATE' in w for w in early)
