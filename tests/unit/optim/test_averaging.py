"""The average of the weights equals torch's, is evaluated and exported, and survives a stop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paxlite
from paxlite.checkpointing.source import find_source
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.optim.optimizers import Optimizer
from tests.support import runs
from tests.support.experiments import TinyText

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
  assert optimizer.evaluated(state, params) == params  # also those that a run is restored from
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkpoint_holds_the_average_on_every_mesh_and_after_a_stop(tmp_path):
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_average_is_what_is_evaluated_and_loaded(tmp_path):
  values = dict(
    EMA_DECAY=DECAY, LEARNING_RATE=0.05, LR_SCHEDULE='constant', MAX_STEPS=4, NUM_LAYERS=2,
    FPROP_DTYPE='float32', SAMPLE_PROMPT=None, USE_REPEATED_LAYER=True,
  )  # fmt: skip
  held_out = lambda name: runs.records(tmp_path / name, 'eval_metrics.jsonl')[-1]['avg_xent']
  paxlite.train(TinyText(**values), tmp_path / 'one')
  paxlite.train(TinyText(OFFLOAD_OPTIMIZER=True, **values), tmp_path / 'host')
  assert held_out('host') == pytest.approx(held_out('one'), rel=1e-5)
  paxlite.train(TinyText(**(values | {'EMA_DECAY': 0.0})), tmp_path / 'plain')
  assert abs(held_out('plain') - held_out('one')) > 1e-3
  # factors that do not move, beside what they start from
  start = dict(CHECKPOINT_RESTORE_PATH=str(tmp_path / 'one'), USE_LORA=True, LORA_RANK=2)
  still = values | start | {'LEARNING_RATE': 0.0, 'EMA_DECAY': 0.0, 'MAX_STEPS': 1}
  paxlite.train(TinyText(**still), tmp_path / 'lora')
  assert held_out('lora') == pytest.approx(held_out('one'), rel=1e-6)
  one, lora = (paxlite.load(tmp_path / name).logits([1, 2, 3]) for name in ('one', 'lora'))
  np.testing.assert_allclose(lora, one, atol=1e-5)
  without = TinyText(**(values | {'EMA_DECAY': 0.0, 'MAX_STEPS': 5}))
  with pytest.raises(UserError, match='restore the former EMA_DECAY'):
    paxlite.train(without, tmp_path / 'one', accept_changes=True)
