"""Logits, loss, gradients, initial values, schedules and Adam equal those of praxis."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from flax.linen import meta

from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.optim import by_name, schedules, transformations
from tests.support import praxis

SMALL = dict(
  NUM_LAYERS=2, MODEL_DIMS=32, NUM_HEADS=4, VOCAB_SIZE=64, MAX_SEQ_LEN=16, FPROP_DTYPE='float32'
)


LLAMA = SMALL | dict(HIDDEN_DIMS=88)

CASES = {
  'gpt2l': GPT126M(**SMALL),
  'gpt2l_repeated': GPT126M(**SMALL, USE_REPEATED_LAYER=True),
  'llama2l_mha': LLaMA(**LLAMA, USE_REPEATED_LAYER=False),
  'llama2l_mha_lora_all': LLaMA(
    **LLAMA, USE_REPEATED_LAYER=False, USE_LORA=True, LORA_RANK=4, TRAINABLE_VARIABLES=['.*']
  ),
}


def flat(tree):
  return traverse_util.flatten_dict(tree, sep='/')


@pytest.fixture(autouse=True)
def highest_precision():
  with jax.default_matmul_precision('highest'):
    yield


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.usefixtures('platform')
@pytest.mark.parametrize('name', CASES)
def test_logits_loss_and_every_gradient(name):
  reference = praxis.load(name)
  params, batch = praxis.tree(reference, 'params'), praxis.batch(reference)
  task = fdl.build(CASES[name].build_task())

  arrays = batch['ids'], batch['segment_pos'], batch['segment_ids']
  logits = jax.jit(task.model.apply)({'params': params}, *arrays)
  np.testing.assert_allclose(logits, reference['logits'], atol=2e-5, rtol=1e-4)

  @jax.jit
  def losses_of(params):
    model = task.model.bind({'params': params})
    return model.token_losses(model.hidden(*arrays), batch['labels']).xent

  xent = losses_of(params) * batch['weights']
  np.testing.assert_allclose(xent, reference['per_token_xent'], atol=2e-5, rtol=1e-4)

  # praxis counts each batch of balancing losses as one, paxlite by its tokens that are no padding
  weights = {'aux_loss': (batch['segment_ids'] > 0).mean()}
  grads, _, metrics = jax.jit(lambda p: task.grads(p, batch, None))(params)
  for metric, value in metrics.items():
    np.testing.assert_allclose(
      value.value, reference[f'metric/{metric}'], atol=5e-6, err_msg=metric
    )
    weight = weights.get(metric, reference[f'metric_weight/{metric}'])
    np.testing.assert_allclose(value.weight, weight, err_msg=metric)
  expected = flat(praxis.tree(reference, 'grads'))
  assert flat(grads).keys() == expected.keys()
  for path, grad in flat(grads).items():
    np.testing.assert_allclose(grad, expected[path], atol=2e-5, rtol=1e-4, err_msg=path)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  ('name', 'largest'), [('gpt2l', 5.0), ('llama2l_mha', 3**0.5)], ids=['normal', 'uniform']
)
def test_initial_values(name, largest):
  """Shapes and distributions equal those of praxis.

  Both sides are random. Standard deviations differ by less than 5 standard errors, and no value is
  more than `largest` standard deviations away from 0.
  """
  init = jax.jit(fdl.build(CASES[name].build_task()).init_params)
  params = flat(meta.unbox(init(jax.random.key(0))))
  stats = praxis.init_stats(name)
  tied = 'lm/embedding_lookup/emb_var' not in stats
  assert len(stats) == len(params)
  for path, (shape, mean, std) in stats.items():
    value = np.asarray(params[praxis.our_path(path, tied)])
    if path == 'lm/softmax/logits_ffn/linear/w':
      shape = shape[::-1]
    assert list(value.shape) == shape, path
    if std == 0:
      np.testing.assert_array_equal(value, mean, err_msg=path)
      continue
    error = std / np.sqrt(value.size)
    assert abs(value.mean()) < 5 * error, path
    assert abs(value.std() - std) < 5 * error, path
    assert np.abs(value).max() < (largest + 0.1) * std, path


SCHEDULES = {
  'gpt126m': schedules.linear_rampup_cosine_decay(1.0, 636, 637, 500_000),
  'gpt5b': schedules.linear_rampup_cosine_decay(1.0, 115, 116, 62_500),
  'gpt175b': schedules.linear_rampup_cosine_decay(1.0, 265, 266, 108_600),
  'lred_default': schedules.linear_rampup_exponential_decay(1.0, 4000, 4001, 300_000),
  'tiny': schedules.linear_rampup_cosine_decay(1.0, 2, 3, 8),
}


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedules(name):
  reference = praxis.load('schedules')
  values = [float(SCHEDULES[name](int(s))) for s in reference['steps']]
  np.testing.assert_allclose(values, reference[name], atol=1e-6)


@pytest.mark.parametrize(
  ('cls', 'schedule'), [(GPT126M, 'gpt126m'), (LanguageModel, 'lred_default')]
)
def test_experiments_have_these_schedules(cls, schedule):
  reference = praxis.load('schedules')
  built = fdl.build(cls(LEARNING_RATE=1.0).schedule())
  values = [float(built(int(s))) for s in reference['steps']]
  np.testing.assert_allclose(values, reference[schedule], atol=1e-6)


def test_adam():
  """Compares five updates of GPT126M's Adam with the tiny schedule, and the final moments."""
  reference = praxis.load('adam_gpt126m')
  at = lambda prefix: {'w': reference[f'{prefix}/w'], 'b': reference[f'{prefix}/b']}
  schedule = schedules.linear_rampup_cosine_decay(6e-4, 2, 3, 8)
  adam = by_name.adam(
    schedule,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-8,
    adam_clip_threshold=-1.0,
    weight_decay=0.1,
    clip_gradient_norm_to_value=0.0,  # the reference has only Adam
  )
  params = jax.tree.map(jnp.asarray, at('p0'))
  state = adam.init(params)
  for i in range(5):
    updates, state = adam.update(at(f'g{i}'), state, params)
    params = optax.apply_updates(params, updates)
    for k in 'wb':
      np.testing.assert_allclose(updates[k], at(f'u{i}')[k], atol=1e-6, rtol=1e-5)
      np.testing.assert_allclose(params[k], at(f'p{i + 1}')[k], atol=1e-6)
  moments = next(s for s in state if isinstance(s, transformations.PaxAdamState))
  for k in 'wb':
    np.testing.assert_allclose(moments.m[k], reference[f'm/{k}'], atol=1e-6)
    np.testing.assert_allclose(moments.v[k], reference[f'v/{k}'], atol=1e-6)


def test_the_update_cap_is_per_layer_of_a_repeated_stack():
  """As in Pax, a stacked variable is updated as if its layers were separate variables."""
  adam = transformations.scale_by_pax_adam(update_clip=0.5)
  rng = np.random.default_rng(0)
  grads = [rng.normal(size=(3, 4, 5)) * np.array([1, 10, 0.1])[:, None, None] for _ in range(3)]
  stacked, single = {'repeat': {'w': jnp.zeros((3, 4, 5))}}, [{'w': jnp.zeros((4, 5))}] * 3
  state, states = adam.init(stacked), [adam.init(s) for s in single]
  for g in grads:
    together, state = adam.update({'repeat': {'w': jnp.asarray(g)}}, state)
    for i in range(3):
      alone, states[i] = adam.update({'w': jnp.asarray(g[i])}, states[i])
      np.testing.assert_allclose(together['repeat']['w'][i], alone['w'], rtol=1e-6)
      assert np.sqrt(np.mean(np.square(alone['w']))) <= 0.5 + 1e-6
