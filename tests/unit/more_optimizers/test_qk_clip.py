"""QK-clip: the largest logits of heads, and weights that bring them to the threshold."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.experiments import options
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.llama import LLaMA7B
from paxlite.layers.attention.attention import DotProductAttention
from paxlite.more_optimizers.qk_clip import LARGEST
from paxlite.training.step import train_step

TINY = dict(
  NUM_LAYERS=2, MODEL_DIMS=16, NUM_HEADS=4, VOCAB_SIZE=64, MAX_SEQ_LEN=12, FPROP_DTYPE='float32',
  ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1], PERCORE_BATCH_SIZE=4, OPTIMIZER='muon',
  LEARNING_RATE=0.02, USE_REPEATED_LAYER=False, HIDDEN_DIMS=32, CHECKPOINT_POLICY='SAVE_EVERYTHING',
)  # fmt: skip
LATENT = dict(
  HEADS_SPAN_MODEL=False, DIMS_PER_HEAD=6, VALUE_DIMS_PER_HEAD=5, ROTARY_DIMS_PER_HEAD=4,
  LATENT_DIMS=8, NUM_EXPERTS=4, NUM_EXPERTS_PER_TOKEN=2, EXPERT_HIDDEN_DIMS=8, NUM_EXPERT_GROUPS=1,
  NUM_EXPERT_GROUPS_PER_TOKEN=1, NUM_DENSE_BLOCKS=1, NUM_PREDICTION_MODULES=0,
)  # fmt: skip
CASES = {
  'latents of queries': (DeepSeekV3, LATENT | dict(QUERY_LATENT_DIMS=7)),
  'grouped queries': (LLaMA7B, dict(NUM_KV_HEADS=2, SLIDING_WINDOW=5)),
  'repeated': (TinyGPT, dict(USE_REPEATED_LAYER=True)),
  'biases': (TinyGPT, dict(USE_BIAS=True, NUM_MICROBATCHES=2)),
  'latents': (DeepSeekV3, LATENT | dict(QUERY_LATENT_DIMS=0)),
  'one key head': (LLaMA7B, dict(NUM_KV_HEADS=1)),
}


def made(case, clip, **more):
  cls, values = CASES[case]
  values = TINY | values | more | dict(QK_CLIP=clip)
  e = options.with_parts(cls, dict(QK_CLIP=1.0))(**values)
  e.validate()
  return fdl.build(e.build_task())


def batch_of(task, rng):
  ids = rng.integers(0, 64, (4, 13))
  segments = np.sort(rng.integers(1, 3, (4, 12)))
  starts = np.arange(12) - np.argmax(segments[:, :, None] == segments[:, None], -1)
  found = dict(
    ids=ids[:, :-1], labels=ids[:, 1:], segment_ids=segments, segment_pos=starts,
    weights=np.ones((4, 12), np.float32),
  )  # fmt: skip
  return {
    k: jnp.asarray(x, x.dtype if x.dtype == np.float32 else np.int32) for k, x in found.items()
  }


def state_of(task, rng):
  """A state whose heads have logits of unlike sizes."""

  def one(path, x):
    is_query = path_name(path).endswith(('query/w', 'combined/w'))
    return x * rng.uniform(1, 30, (x.shape[-2], 1)) if is_query else x

  state = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
  return state.replace(params=jax.tree_util.tree_map_with_path(one, state.params))


def by_hand(task, params, batch):
  """The largest logit of each head by layer, in float64, from the queries and keys themselves."""
  found = {}

  def seen(function, arguments, keywords, context):
    if type(context.module) is DotProductAttention and context.method_name == '__call__':
      q, k = (np.asarray(x, np.float64) for x in arguments[:2])
      k = k.repeat(q.shape[2] // k.shape[2], axis=2)
      scores = context.module.query_scale * np.einsum('BTNH,BSNH->BNTS', q, k)
      segments, at = np.asarray(batch['segment_ids']), np.arange(q.shape[1])
      mask = (segments[:, :, None] == segments[:, None]) & (at[:, None] >= at)
      if context.module.window:
        mask &= at[:, None] - at < context.module.window
      scores = np.where(mask[:, None], scores, -np.inf)
      found['/'.join(context.module.path[:-1])] = scores.max((0, 2, 3))
    return function(*arguments, **keywords)

  with nn.intercept_methods(seen), jax.disable_jit():
    model = task.model.bind({'params': params})
    model(batch['ids'], batch['segment_pos'], batch['segment_ids'])
  return found


def metrics_of(task):
  return jax.jit(lambda params, batch: task.grads(params, batch, None)[2])


def observed(metrics):
  start = f'{LARGEST}/'
  return {
    name.removeprefix(start).partition('/dot_product')[0]: np.asarray(m.value)
    for name, m in metrics.items()
    if name.startswith(start)
  }


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_a_step_shrinks_heads_whose_largest_logit_is_above_the_threshold(case):
  rng = np.random.default_rng(len(case))
  plain, clipping = made(case, 0.0), made(case, 1.0)
  batch = batch_of(plain, rng)
  state = state_of(plain, rng)
  largest = observed(metrics_of(clipping)(state.params, batch))
  if case != 'repeated':  # where a loop over layers has no values to look at
    wanted = by_hand(plain, state.params, batch)
    assert wanted.keys() == largest.keys()
    for name, of_heads in wanted.items():
      np.testing.assert_allclose(largest[name], of_heads, rtol=1e-5)
  threshold = float(np.median(np.concatenate([x.ravel() for x in largest.values()])))
  clipping = made(case, threshold)

  # the weights after a step are those of Muon, and then smaller
  step = lambda task: jax.jit(functools.partial(train_step, task, 0))(state, batch)
  (of_muon, _), (after, metrics) = step(plain), step(clipping)
  assert all(not m.value.ndim for m in metrics.values())
  metrics_after, clip = metrics_of(clipping), jax.jit(clipping.after_update)
  before = metrics_after(state.params, batch)
  shrunk = clip(of_muon.params, before, True)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), shrunk, after.params)
  # with the same weights, each head that was above the threshold would have had it
  params = clip(state.params, before, True)
  # in the first layer: a change there moves the logits of those behind it
  name = min(largest)
  first = lambda x: x if x.ndim == 1 else x[0]
  np.testing.assert_allclose(
    first(observed(metrics_after(params, batch))[name]),
    np.minimum(first(largest[name]), threshold),
    rtol=1e-4,
  )
  kept = clip(state.params, before, False)
  jax.tree.map(np.testing.assert_array_equal, kept, state.params)


@pytest.mark.parametrize(
  ('case', 'values', 'message'),
  [
    ('biases', dict(QK_NORM='per_head'), 'QK_CLIP=1 needs QK_NORM=none'),
    ('grouped queries', dict(USE_LORA=True), 'whole weights that are all trained'),
    ('repeated', dict(TRAINABLE_VARIABLES=['softmax.*']), 'whole weights that are all trained'),
    ('repeated', dict(
      MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1],
      DCN_MESH_SHAPE=[1] * 4, NUM_MICROBATCHES=2), 'a mesh without the axes stage and context'),
    ('repeated', dict(USE_TE='layer'), "needs paxlite's own attention, not USE_TE=layer"),
  ],
)  # fmt: skip
def test_what_it_does_not_clip_is_refused(case, values, message):
  with pytest.raises(UserError, match=message):
    made(case, 1.0, **values)
