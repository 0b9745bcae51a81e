"""Rollouts made ahead of training, and answers that go on in the next rollout."""

import copy
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.finetuning.reinforcement.policy_loss import BEHAVIOUR, OLD, STALENESS
from paxlite.finetuning.reinforcement.rollout_devices import Generation
from paxlite.finetuning.reinforcement.rollouts import RunFiles
from tests.runs import test_rollouts
from tests.runs.test_rollouts import made

files = test_rollouts.files
ROWS = slice(0, 16)
LONG = dict(MAX_SEQ_LEN=128, MAX_NEW_TOKENS=100)
OLDER = dict(
  MAX_STALENESS=4, UPDATES_PER_BATCH=2, PARTIAL_ROLLOUTS=1, NUM_MICROBATCHES=4, PACKED_INPUT=True
)


def moved(params, number):
  """Returns the parameters after so many updates, as a run would have them."""
  shift = lambda x: x + 0.03 * number * jnp.sin(jnp.arange(x.size)).reshape(x.shape)
  return jax.tree.map(shift, params)


@pytest.mark.slow
@pytest.mark.parametrize(
  'values',
  [dict(PARTIAL_ROLLOUTS=2), dict(MAX_STALENESS=2), dict(MAX_STALENESS=1, PARTIAL_ROLLOUTS=1)],
)
def test_tokens_have_the_probabilities_of_the_parameters_that_wrote_them(files, values):
  e, rollouts, params = made(files, **values, **LONG)
  logits_of = jax.jit(fdl.build(e.build_task()).model.apply)
  decode = rollouts._actor.engine.tokenizer.decode_marked
  seen = set()
  for number in range(4):
    answered = []
    rollouts._note = lambda _, found: answered.extend(found)  # noqa: B023
    rollouts.run_files = RunFiles(files / str(values), True, lambda: 0)
    batch = rollouts.next_batch(moved(params, number), number, ROWS)
    own = batch['weights'] > 0
    written = number - batch[STALENESS]
    for by in np.unique(written[own]):
      log_probs = jax.nn.log_softmax(logits_of({'params': moved(params, by)}, batch['ids']))
      found = np.take_along_axis(np.asarray(log_probs), batch['labels'][..., None], 2)[..., 0]
      here = own & (written == by)
      np.testing.assert_allclose(batch[BEHAVIOUR][here], found[here], atol=2e-5)
    seen |= {(number, int(stale)) for stale in np.unique(batch[STALENESS][own])}
    for one in answered:
      episode = one.episode
      (message,) = episode.messages
      ids = [i for i, mine in zip(episode.ids, episode.is_own, strict=True) if mine]
      assert message['content'] == decode(ids[:-1] if ids[-1] == 2 else ids)
      assert episode.is_cut == (len(ids) == 100 and ids[-1] != 2)
  assert max(stale for _, stale in seen) >= 1
  if values.get('MAX_STALENESS') == 2:
    assert seen == {(0, 0), (1, 1), (2, 2), (3, 2)}


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('values', 'beside'), [(dict(PARTIAL_ROLLOUTS=2), False), (OLDER, False), (OLDER, True)]
)
def test_what_is_open_goes_on_after_an_end(files, tmp_path, values, beside, caplog):
  """Also from a state of a moment when a thread has not yet made what was begun."""
  batches, states = {}, {}
  keep = RunFiles(tmp_path / 'rollouts', True, lambda: 0)
  _, whole, params = made(files, **values, **LONG)
  whole.run_files = keep
  whole._behaviour = copy.copy(whole._behaviour)
  whole._generation = Generation(whole._generation._ahead, beside)
  for number in range(6):
    states[number] = whole.state()
    batches[number] = whole.next_batch(moved(params, number), number, ROWS)
  assert beside == any(state['next'] < state['begun'] for state in states.values())
  whole.wait(states[3])
  whole.close()
  for start in (2, 3):
    _, after, _ = made(files, **values, **LONG)
    after.run_files = keep
    after.restore(states[start])
    assert after.state() == states[start]
    for number in range(start, 6):
      found = after.next_batch(moved(params, number), number, ROWS)
      for name, array in batches[number].items():
        np.testing.assert_array_equal(array, found[name], err_msg=f'{name} of {number}')
  assert not caplog.records
  for path in (tmp_path / 'rollouts').iterdir():
    path.write_bytes(b'damaged')
  _, again, _ = made(files, **values, **LONG)
  again.run_files = keep
  again.restore(states[2])
  again.next_batch(moved(params, 2), 2, ROWS)
  assert 'are not in the run folder: their prompts are answered again' in caplog.text
  state = again.state()
  known = [*state['open'], *(n for numbers in state['made'].values() for n in numbers)]
  assert len({*known}) == len(known)


@pytest.mark.slow
def test_of_fresh_tokens_the_ratios_are_1(files):
  """The first step of a rollout compares numbers of one program."""
  e, rollouts, params = made(files, PARTIAL_ROLLOUTS=1, UPDATES_PER_BATCH=2, **LONG)
  batch = rollouts.next_batch(params, 0, ROWS)
  np.testing.assert_array_equal(batch[BEHAVIOUR], batch[OLD] * (batch['weights'] > 0))
  task = fdl.build(e.build_task())
  _, _, metrics = jax.jit(functools.partial(task.grads, rng=None))(params, batch)
  assert float(metrics['importance'].value) == 1
  assert float(metrics['truncated'].value) == float(metrics['staleness'].value) == 0
