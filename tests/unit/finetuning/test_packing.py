"""Packed rows: losses, metrics and gradients are those of one episode, or one pair, a row."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.data.base import one_segment
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.preferences.attributes import Preferences
from paxlite.finetuning.preferences.datasets import PreferenceFiles
from paxlite.finetuning.preferences.reward_model import RewardModel
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.finetuning.reinforcement.packing import Packing
from paxlite.finetuning.reinforcement.policy_loss import OLD
from paxlite.training.microbatch_loop import summed

B, T, V = 8, 32, 16


class Tiny(LLaMA):
  NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, MODEL_DIMS, HIDDEN_DIMS = 1, 4, 2, 32, 48
  VOCAB_SIZE, MAX_SEQ_LEN, PERCORE_BATCH_SIZE, FPROP_DTYPE = V, T, B, 'float32'


class Rewarded(PromptFiles, Tiny):
  """Rewards; the batches are drawn here."""

  UPDATES_PER_BATCH, CLIP_LOW, CLIP_HIGH, KL_WEIGHT = 2, 0.1, 0.1, 0.3


class Paired(PreferenceFiles, Preferences, Tiny):
  """Pairs, or labelled answers."""


class Judge(RewardModel, PreferenceFiles, Tiny):
  """A reward model."""


@functools.cache
def task_of(cls, **values):
  return fdl.build(cls(**values).build_task())


@functools.cache
def params_of(cls, **values):
  """Returns parameters that are not the reference's."""
  params = meta.unbox(jax.jit(task_of(cls, **values).init)(jax.random.key(0))).params
  move = lambda x: x + 0.1 * np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
  moved = jax.tree.map(lambda x: jnp.asarray(move(np.asarray(x))), params)
  return moved | {k: v for k, v in params.items() if k == 'reference'}


def grads(cls, batch, **values):
  """Returns the gradients and metrics of a step; rows that are packed change no parameter."""
  task = task_of(cls, **values)
  params = params_of(cls, **{k: v for k, v in values.items() if k != 'PACKED_INPUT'})
  found, _, metrics = jax.jit(lambda p, b: task.grads(p, b, None))(params, batch)
  return found, {name: float(m.value) for name, m in metrics.items()}


def assert_same(one, other):
  (found, metrics), (expected, expected_metrics) = one, other
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
  assert scale > 1e-4
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * max(scale, 1))
  jax.tree.map(close, found, expected)
  assert metrics.keys() == expected_metrics.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(value, expected_metrics[name], rtol=2e-6, atol=1e-6, err_msg=name)


def row(rng, length, first, **arrays):
  """Returns the arrays [T] of a sequence whose tokens from `first` on are learned."""
  ids = rng.integers(1, V, T + 1)
  is_own = (np.arange(T) >= first) & (np.arange(T) < length)
  is_own &= (rng.random(T) < 0.8) | (np.arange(T) == length - 1)  # replies of an environment
  kept = lambda x, dtype: np.where(np.arange(T) < length, x, 0).astype(dtype)
  own = kept(is_own, np.float32)
  of_own = {name: own * np.float32(value) for name, value in arrays.items()}
  return {'ids': kept(ids[:-1], np.int32), 'labels': kept(ids[1:], np.int32), 'weights': own} | (
    of_own
  )


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize('ratio', ['token', 'sequence'])
@pytest.mark.parametrize('mean', ['grpo', 'dr_grpo', 'dapo'])
@pytest.mark.parametrize('seed', range(4))
def test_packed_episodes_are_those_of_one_a_row(mean, ratio, seed):
  """Microbatches that are left empty are not computed: a number there would be seen."""
  rng = np.random.default_rng(seed)
  lengths = np.exp(rng.uniform(np.log(T / 8), np.log(T + 1), B)).astype(int).tolist()
  rows = []
  for length in lengths:
    first = int(rng.integers(0, length - 1))
    one = row(rng, length, first, advantages=rng.normal())
    rewards = np.zeros(T, np.float32)
    rewards[length - 1] = rng.normal()
    old = (-rng.uniform(2, 4, T)).astype(np.float32)
    rows.append(one | {'rewards': rewards, OLD: old * (one['weights'] > 0)})
  plain = {name: np.stack([one[name] for one in rows]) for name in rows[0]}
  packed = Packing(4, 4).batch(rows, lengths)
  assert (packed['segment_ids'].max(1) <= 3).all()
  empty = ~packed['weights'].any(1)
  full = -(-(B - int(empty.sum())) // 2)  # microbatches of two rows
  assert full < 4
  for name in ('advantages', OLD):
    packed[name][np.arange(B) % 4 >= full] = np.nan
  values = dict(POLICY_MEAN=mean, POLICY_RATIO=ratio, NUM_MICROBATCHES=4)
  expected = grads(Rewarded, plain | one_segment(plain['weights']), **values)
  assert_same(grads(Rewarded, packed, PACKED_INPUT=True, **values), expected)


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(
  ('cls', 'values'),
  [
    (Paired, dict(PREFERENCE_LOSS=kind))
    for kind in ('sigmoid', 'kto', 'ipo', 'hinge', 'robust', 'orpo', 'simpo')
  ]
  + [(Judge, dict(CENTER_REWARDS=0.1))],
)
def test_packed_pairs_are_those_of_one_a_row(cls, values):
  rng = np.random.default_rng(0)
  plain = {name: np.zeros((B, T), np.int32) for name in ('segment_ids', 'segment_pos')}
  plain |= {name: np.zeros((B, T), np.int32) for name in ('ids', 'labels', 'preferences')}
  plain |= {'weights': np.zeros((B, T), np.float32)}
  packed = {name: np.zeros((B // 2, T), x.dtype) for name, x in plain.items()}
  is_kto = values.get('PREFERENCE_LOSS') == 'kto'
  for pair in range(B):
    sign, start, begin = (-1) ** pair if is_kto else 1, 0, pair % 2 * 16
    for answer in range(2):
      length = int(rng.integers(3, 9))
      one = row(rng, length, length - 1 if cls is Judge else 1)
      one['preferences'] = sign * np.full(T, 1 + answer if is_kto else 1 - 2 * answer, np.int32)
      one['segment_pos'], one['segment_ids'] = np.arange(T), np.full(T, 1 + answer)
      for name, x in one.items():
        plain[name][pair, start : start + length] = x[:length]
        more = 2 * (pair % 2) if name == 'segment_ids' else 0
        at = slice(begin + start, begin + start + length)
        packed[name][pair // 2, at] = x[:length] + more
      start += length
  assert_same(grads(cls, packed, **values), grads(cls, plain, **values))


def test_microbatches_behind_the_last_full_one_are_not_computed():
  xs = jnp.array([1.0, 2.0, jnp.nan, jnp.nan])
  part = lambda i, x, carry: (3 * x, carry + 1, x + i)
  total, carry, outputs = jax.jit(lambda n: summed(part, jnp.float32(0), 0, xs, n))(2)
  assert (float(total), int(carry), outputs.tolist()) == (9, 2, [1, 3, 0, 0])
  total, carry, _ = jax.jit(lambda n: summed(part, jnp.float32(0), 0, xs, n))(0)
  assert (float(total), int(carry)) == (0, 0)
