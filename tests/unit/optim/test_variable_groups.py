"""Learning rates and weight decays of some variables."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.optim import by_name
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.schedules import constant

PARAMS = {'head': {'w': jnp.full((2, 3), 2.0), 'b': jnp.full(3, 4.0)}, 'table': jnp.ones((4, 2))}


def update(make, rate_factors=(), **values):
  """Returns the update of zero gradients, and that of ones without decay."""
  found = []
  for grad, decay in ((0.0, 0.1), (1.0, 0.0)):
    transformation = make(constant(0.5), weight_decay=decay, **values)
    optimizer = Optimizer(transformation, rate_factors=rate_factors)
    state = optimizer.init(PARAMS)
    grads = optax.tree.full_like(PARAMS, grad)
    new, _ = optimizer.update(grads, jnp.ones(()), jnp.asarray(True), state, PARAMS)
    found.append(optax.tree.sub(new, PARAMS))
  return found


@pytest.mark.parametrize('name', ['adam', 'adamw', 'lion', 'sgd'])
def test_factors_of_rates_and_decays(name):
  beta2 = {} if name in ('adam', 'adamw', 'lion') else None
  values = dict(adam_beta1=0.9)
  if beta2 is not None:
    values |= dict(adam_beta2=0.99)
  if name == 'adamw':
    values |= dict(adam_epsilon=1e-8, adam_epsilon_root=0.0)
  values['weight_decay_factors'] = ['.*/b=0', 'table=3', '.*=1']
  decay, step = update(by_name.find(name).make, ['table=0.1'], **values)
  close = lambda x, y: np.testing.assert_allclose(x, np.full(x.shape, y), rtol=1e-5)
  close(decay['head']['w'], -0.5 * 0.1 * 2)
  close(decay['head']['b'], 0)
  close(decay['table'], -0.5 * 0.1 * 3 * 0.1)
  close(step['head']['w'], step['head']['b'][0])
  close(step['table'], 0.1 * step['head']['b'][0])


def test_wrong_factors_are_refused():
  for text in ('.*', '(=1', '.*=x', '.*=-1', '=nan', '.*=inf'):
    with pytest.raises(UserError, match=r'WEIGHT_DECAY_FACTORS: .* must be PATTERN=FACTOR'):
      TinyGPT(WEIGHT_DECAY_FACTORS=[text]).validate()
  with pytest.raises(
    UserError, match="LEARNING_RATE_FACTORS: 'embed' matches the whole name of no"
  ):
    Optimizer(optax.sgd(0.1), rate_factors=['embed=2']).init(PARAMS)
  with pytest.raises(UserError, match=r"WEIGHT_DECAY_FACTORS: '.*/bais' matches the whole name"):
    update(by_name.find('sgd').make, adam_beta1=0.9, weight_decay_factors=['.*/bais=0'])
