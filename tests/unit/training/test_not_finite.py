"""A number that is not finite is never hidden: wherever it enters a step, the step is skipped."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.linen import meta

from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.training.step import train_step
from tests.support.meshes import compiled

SIZES = dict(
  NUM_LAYERS=2, MODEL_DIMS=16, HIDDEN_DIMS=32, NUM_HEADS=2, VOCAB_SIZE=32, MAX_SEQ_LEN=16,
  USE_REPEATED_LAYER=True, FPROP_DTYPE='float32', ICI_MESH_SHAPE=[1, 1, 1],
  DCN_MESH_SHAPE=[1, 1, 1],
)  # fmt: skip
EXPERTS = dict(BLOCKS_PER_LAYER=1, NUM_EXPERTS=4, NUM_MOE_GROUPS=1, HEADS_SPAN_MODEL=True)
CASES = {
  'relu': (GPT126M, dict(ACTIVATION_CLS='relu')),
  'relu in FP8': (GPT126M, dict(ACTIVATION_CLS='relu', USE_FP8=True, FPROP_DTYPE='bfloat16')),
  'gelu': (GPT126M, dict(ACTIVATION_CLS='gelu', NUM_LOSS_CHUNKS=2)),
  'gelu_exact, caps': (
    GPT126M,
    dict(ACTIVATION_CLS='gelu_exact', ATTEN_LOGIT_CAP=5.0, SOFTMAX_CAP_LOGITS=5.0),
  ),
  'gated silu in bfloat16': (
    TinyGPT,
    dict(
      ACTIVATION_CLS='silu', USE_GATED_ACTIVATION=True, FPROP_DTYPE='bfloat16', SLIDING_WINDOW=4,
      ADAM_MOMENTS_DTYPE='bfloat16', GRADIENT_DTYPE='bfloat16', ATTENTION_BLOCK_SIZE=4,
      NUM_MICROBATCHES=2,
    ),
  ),
  'clamped_swiglu': (
    TinyGPT,
    dict(ACTIVATION_CLS='clamped_swiglu', USE_GATED_ACTIVATION=True, ATTENTION_BLOCK_SIZE=8),
  ),
  'relu in float16': (GPT126M, dict(ACTIVATION_CLS='relu', FPROP_DTYPE='float16')),
  'int8': (GPT126M, dict(ACTIVATION_CLS='relu', USE_INT8='forward_backward')),
  'experts with a capacity': (MixtureOfExperts, EXPERTS),
  'experts in FP8': (MixtureOfExperts, EXPERTS | dict(USE_FP8=True)),
  'dropless experts': (MixtureOfExperts, EXPERTS | dict(USE_DROPLESS_MOE=True)),
  'balanced experts': (
    MixtureOfExperts, EXPERTS | dict(USE_DROPLESS_MOE=True, ROUTER='balanced', NUM_EXPERT_GROUPS=2)
  ),
}  # fmt: skip


@functools.cache
def step_of(case):
  """Returns a compiled step, a state after one good step, and a batch in which each id occurs."""
  cls, values = CASES[case]
  task = fdl.build(cls(**SIZES | values).build_task())
  ids = jax.random.permutation(jax.random.key(1), jnp.arange(64) % 32).reshape(4, 16)
  segments = jnp.where(jnp.arange(16) < 6, 1, 2) * jnp.ones((4, 1), jnp.int32)
  positions = jnp.where(jnp.arange(16) < 6, jnp.arange(16), jnp.arange(16) - 6)
  batch = {'ids': ids, 'labels': jnp.roll(ids, -1, 1), 'weights': jnp.ones((4, 16))}
  batch |= {'segment_ids': segments, 'segment_pos': jnp.broadcast_to(positions, (4, 16))}
  start = jax.jit(lambda rng: meta.unbox(task.init(rng)))
  state = compiled(start, jax.random.key(0))(jax.random.key(0))
  step = compiled(jax.jit(functools.partial(train_step, task, 0)), state, batch)
  state, metrics = step(state, batch)
  assert metrics['learning/is_valid_step'].value
  return step, state, batch


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_a_step_with_a_number_that_is_not_finite_is_skipped(case):
  """NaN or an infinite number is one entry of each variable in turn."""
  step, state, batch = step_of(case)
  flat = traverse_util.flatten_dict(state.params, sep='/')
  hidden = []
  for name, w in flat.items():
    if name.endswith('replaced_bias'):
      continue  # the rule of the load moves it; see test_moe
    middle = tuple(n // 2 for n in w.shape)
    # clamped_swiglu limits its arguments, so that an infinite bias has the effect of a large one
    is_limited = case == 'clamped_swiglu' and 'ffn_layer1' in name and name.endswith('/b')
    for value in (np.nan,) if is_limited else (np.nan, np.inf):
      poisoned = w.at[middle].set(value)
      params = traverse_util.unflatten_dict(flat | {name: poisoned}, sep='/')
      after, metrics = step(state.replace(params=params), batch)
      if metrics['learning/is_valid_step'].value:
        hidden.append((name, value))
      else:
        assert int(after.skipped) == int(state.skipped) + 1
  assert not hidden
