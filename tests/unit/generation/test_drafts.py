"""Greedy text with drafts is that without them, in fewer steps where drafts are right."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.llama import LLaMA
from paxlite.generation.drafts import Drafts
from paxlite.generation.engine import Engine

V, NEW = 11, 20
SMALL = dict(
  NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, NUM_KV_HEADS=1, HIDDEN_DIMS=24, VOCAB_SIZE=V,
  MAX_SEQ_LEN=64, FPROP_DTYPE='float32', NUM_PREDICTION_MODULES=1, USE_REPEATED_LAYER=False,
)  # fmt: skip


def model_and_params():
  """Returns a model whose next token is mostly a function of the token, as that of its module."""
  model = fdl.build(LLaMA(**SMALL).build_task()).model
  shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape) + (x.ndim == 1), x.dtype)
  params = jax.tree.map(draw, meta.unbox(shapes)['params'])
  projection = params['predictions_0']['projection']
  projection['w'] = 0.1 * projection['w'] + jnp.stack([jnp.eye(16), jnp.zeros((16, 16))])
  return model, params


def steps_of(model, params, prompt, text):
  """Returns how many steps the text takes, from what the module says of the whole text."""
  ids = np.asarray([prompt + text])

  def drafts(params):
    bound = model.bind({'params': params})
    (y,) = bound.predicted(bound.hidden(ids), ids)
    return bound.logits(y).argmax(-1)[0]

  draft_T = np.asarray(jax.jit(drafts)(params))  # of the token two places behind each one
  count, steps = 1, 0
  while count < len(text):
    latest = len(prompt) + count - 1  # the place of the latest token
    is_right = draft_T[latest - 1] == ids[0, latest + 1]
    count, steps = count + 1 + int(is_right), steps + 1
  return steps


@pytest.mark.slow
def test_text_and_steps():
  model, params = model_and_params()
  engine, drafts = Engine(model, params, 64), Drafts(model, params, 64)
  tokens = steps = 0
  for seed, length in enumerate((1, 5, 8)):
    prompt = np.random.default_rng(seed).integers(0, V, length).tolist()
    text = engine.continuations([prompt], NEW)[0]
    found = drafts.continuation(prompt, NEW)
    assert found.ids == text
    assert found.steps == steps_of(model, params, prompt, text)
    tokens, steps = tokens + NEW - 1, steps + found.steps
  assert 0.5 * tokens < steps < 0.9 * tokens  # some drafts were right, and some were not


def test_ends_and_room():
  model, params = model_and_params()
  text = Drafts(model, params, 64).continuation([3, 4, 5], NEW).ids
  end = text[7]
  found = Drafts(model, params, 64, [end]).continuation([3, 4, 5], NEW).ids
  assert found == text[: text.index(end) + 1]
  is_token = np.arange(V - 1) != end
  allowed = Drafts(model, params, 64, is_token=is_token).continuation([3, 4, 5], NEW).ids
  assert not {end, V - 1} & set(allowed)
  assert Drafts(model, params, 10).continuation([3, 4, 5], NEW).ids == text[:7]
  with pytest.raises(UserError, match='at most 3'):
    Drafts(model, params, 3).continuation([3, 4, 5], NEW)
  plain = fdl.build(LLaMA(**SMALL | dict(NUM_PREDICTION_MODULES=0)).build_task()).model
  with pytest.raises(UserError, match='no modules that predict further tokens'):
    Drafts(plain, params, 64)
