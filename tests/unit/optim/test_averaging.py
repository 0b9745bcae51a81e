"""The average of the weights equals torch's, is evaluated and exported, and survives a stop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxlite.checkpointing.source import find_source
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.optim.optimizers import Optimizer
from tests.support import runs

DECAY = 0.9


def test_an_average_is_that_of_torch():
  torch = pytest.importorskip('torch')
  from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

  rng = np.random.default_rng(0)
  start = rng.normal(size=(3, 2)).astype(np.float32)
  layer = torch.nn.Linear(2, 3, bias=False)
  layer.weight.data = torch.tensor(start)
  sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
  theirs = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
  optimizer = Optimizer(optax.sgd(0.1), average_decay=DECAY)
  params = {'w': jnp.asarray(start)}
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for i in range(50):
    gradient = rng.normal(size=(3, 2)).astype(np.float32)
    layer.weight.grad = torch.tensor(gradient)
    sgd.step()
    theirs.update_parameters(layer)
    grads, norm = {'w': jnp.asarray(gradient)}, jnp.ones(())
    params, state = update(grads, norm, jnp.array(True), state, params)
    if i % 10 == 0:  # a step that is skipped changes nothing
      grads = {'w': jnp.full((3, 2), jnp.nan)}
      params, state = update(grads, norm, jnp.array(False), state, params)
  found = optimizer.evaluated(state, params)['w']
  np.testing.assert_allclose(found, theirs.module.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
  assert int(state.num_averaged) == 50
  assert not np.allclose(found, params['w'], atol=1e-3)


def test_without_an_average_the_weights_are_evaluated():
  optimizer = Optimizer(optax.sgd(0.1))
  params = {'w': jnp.ones(2)}
  assert optimizer.evaluated(optimizer.init(params), params) is params
  with pytest.raises(UserError, match='EMA_DECAY'):
    TinyGPT(EMA_DECAY=1.0).validate()


@pytest.mark.slow
def test_a_run_evaluates_and_exports_the_average(tmp_path):
  flags = [f'--fdl.EMA_DECAY={DECAY}', '--fdl.LEARNING_RATE=0.01', '--fdl.LR_SCHEDULE=constant']
  one, four = tmp_path / 'one', tmp_path / 'four'
  runs.run(one, *flags, '--fdl.PERCORE_BATCH_SIZE=16')
  runs.run(four, *flags, '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=4', devices=4)
  source = find_source(one)
  stored, weights = source.variables, source.weights
  names = [n.removeprefix('params/') for n in stored if n.startswith('params/')]
  expected = {f'params/{name}': stored[f'opt_state/average/{name}'].whole() for name in names}
  assert set(weights) == set(expected)
  for name, value in expected.items():
    np.testing.assert_array_equal(weights[name].whole(), value)
    assert not np.array_equal(value, stored[name].whole())
    np.testing.assert_allclose(find_source(four).weights[name].whole(), value, atol=2e-4)
  restored = tmp_path / 'restored'  # a run that starts from the weights, and does not move
  start = [f'--fdl.CHECKPOINT_RESTORE_PATH={one}', '--fdl.LEARNING_RATE=0', '--fdl.MAX_STEPS=1']
  runs.run(restored, *start)
  for name, value in expected.items():
    np.testing.assert_array_equal(find_source(restored).variables[name].whole(), value)
  parts = tmp_path / 'parts'
  runs.run(parts, *flags, '--fdl.PERCORE_BATCH_SIZE=16', '--fdl.MAX_STEPS=4')
  runs.run(parts, *flags, '--fdl.PERCORE_BATCH_SIZE=16')
  for name, value in find_source(parts).weights.items():
    np.testing.assert_array_equal(value.whole(), expected[name])
