"""Squared ReLU, outputs that begin at zero, and the recipe that they belong to."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from flax.traverse_util import flatten_dict

from paxlite.core.errors import UserError
from paxlite.experiments.demo import DemoGPT, DemoGPTAdam, TinyGPT
from paxlite.layers.activations import ACTIVATIONS


def params_of(experiment) -> dict:
  task = fdl.build(experiment.task())
  return flatten_dict(meta.unbox(jax.jit(task.init_params)(jax.random.key(0))), sep='/')


def test_the_squared_relu():
  x = jnp.array([-2.0, 0.0, 3.0])
  np.testing.assert_array_equal(ACTIVATIONS['relu2'](x), [0, 0, 9])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('lora', [False, True])
def test_outputs_begin_at_zero_and_factors_of_lora_do_not(lora):
  params = params_of(TinyGPT(OUTPUT_INIT_STD=0.0, USE_LORA=lora))
  zero = {name for name, x in params.items() if name.endswith('/w') and not x.any()}
  layers = [f'transformer/x_layers_{i}' for i in range(2)]
  expected = [
    f'{x}/{part}/w' for x in layers for part in ('self_attention/post', 'ff_layer/ffn_layer2')
  ]
  assert zero == set(expected)
  assert all(x.any() for name, x in params.items() if name.endswith('/lora_a'))
  with pytest.raises(UserError, match='OUTPUT_INIT_STD=0 needs WEIGHT_INIT=normal'):
    TinyGPT(OUTPUT_INIT_STD=0.0, WEIGHT_INIT='xavier_uniform').validate()


@pytest.mark.slow
def test_the_demos_have_as_many_parameters():
  init = lambda e: fdl.build(e.task()).init_params
  shapes = lambda e: jax.tree.leaves(jax.eval_shape(init(e), jax.random.key(0)))
  size = lambda e: sum(x.size for x in shapes(e))
  assert size(DemoGPT()) == pytest.approx(size(DemoGPTAdam()), rel=1e-3)


@pytest.mark.parametrize('steps', [1, 2, 20, 750])
def test_the_schedule_of_the_recipe_fits_every_number_of_steps(steps):
  DemoGPT(MAX_STEPS=steps).validate()
