"""An optimizer that is registered from outside the package, which treats weights as matrices."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from optax import contrib

from paxlite.config.templates import config
from paxlite.parallel.weight_dims import declared, muon_dims
from paxlite.training.step import train_step
from tests.outside.parts.matrix_optimizer import Orthogonal
from tests.outside.trained import trained, trained_on_one


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_matrix_optimizer_trains_on_eight_devices_as_on_one(tmp_path):
  part = 'matrix_optimizer.Orthogonal'
  eight = trained(tmp_path / 'eight', part, '--fdl.PERCORE_BATCH_SIZE=2')
  one = trained_on_one(tmp_path / 'one', part, 16)
  assert len(one) == 4
  assert eight == pytest.approx(one, rel=1e-4)


class Muon(Orthogonal):
  """Muon of optax, which asks for the dimensions in its own way."""

  def transformation(self):
    return config(muon, schedule=self.schedule())


def muon(schedule):
  return contrib.muon(schedule, muon_weight_dimension_numbers=muon_dims)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('cls', [Orthogonal, Muon])
def test_a_matrix_is_the_same_in_a_repeated_and_in_an_unrolled_stack(cls):
  small = dict(MODEL_DIMS=16, NUM_HEADS=2, VOCAB_SIZE=32, MAX_SEQ_LEN=8)
  unrolled = after_steps(cls(USE_REPEATED_LAYER=False, **small))
  repeated = after_steps(cls(USE_REPEATED_LAYER=True, **small))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), unrolled, repeated)


def after_steps(e):
  """Returns the parameters after two steps from the same initial values, layers stacked."""
  task, data = fdl.build(e.build_task()), fdl.build(e.train_input())
  state = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
  if e.USE_REPEATED_LAYER:
    task_of_layers = fdl.build(e.replaced(USE_REPEATED_LAYER=False).build_task())
    params = stacked(meta.unbox(jax.jit(task_of_layers.init_params)(jax.random.key(0))))
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    with declared(task.boxed_params):
      opt_state = task.optimizer.transformation.init(params)
    state = state.replace(params=params, opt_state=opt_state)
  step = jax.jit(lambda state, batch: train_step(task, e.SEED, state, batch))
  for _, batch in zip(range(2), data.train_batches(0, slice(0, data.batch_size)), strict=False):
    state, _ = step(state, batch)
  return state.params if e.USE_REPEATED_LAYER else stacked(state.params)


def stacked(params):
  """Returns parameters of an unrolled stack as those of a repeated one."""
  layers = params['transformer']
  stack = jax.tree.map(lambda *x: jnp.stack(x), *(layers[k] for k in sorted(layers)))
  return {**params, 'transformer': {'repeat': stack}}
