"""A number that is not finite is traced to the operation, the layer and the line that made it."""

import inspect
import itertools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest
from fiddle import selectors

from paxlite.experiments.demo import TinyGPT
from paxlite.layers.feedforward import FeedForward
from paxlite.training.not_finite import origin_in
from tests.support import runs

# operations at which a finite number becomes another one, with what they do so with
OPERATIONS = {
  'sqrt': (jnp.sqrt, -1.0, 'NaN'), 'log': (jnp.log, -2.0, 'NaN'),
  'log of 0': (jnp.log, 0.0, 'an infinite number'), 'exp': (jnp.exp, 1e3, 'an infinite number'),
  'div': (lambda x: 1 / x, 0.0, 'an infinite number'), 'pow': (lambda x: x**0.5, -1.0, 'NaN'),
}  # fmt: skip


def in_a_loop(function):
  return lambda x: jax.lax.scan(lambda c, s: (c + s, function(s)), 0.0, x)[1]


def in_a_loop_backwards(function):
  return lambda x: jax.lax.scan(lambda c, s: (c, function(s)), 0.0, x, reverse=True)[1]


def in_a_carry(function):
  # the values of the loop are those of the state, which the body changes by a matrix of one
  body = lambda c, s: (jnp.where(s > 1, function(c), c), s)
  return lambda x: jax.lax.scan(body, x, jnp.arange(3.0))[0]


def in_a_branch(function):
  return lambda x: jax.lax.cond(x.sum() < 1e9, function, lambda x: x, x)


AROUND = {
  'plain': lambda function: function, 'jit': jax.jit, 'remat': jax.checkpoint, 'loop': in_a_loop,
  'loop backwards': in_a_loop_backwards, 'carry': in_a_carry, 'branch': in_a_branch,
  'vmap': jax.vmap,
}  # fmt: skip
DRAWN = [
  (operation, [*AROUND][i % len(AROUND)], [*AROUND][(3 * i + 1) % len(AROUND)])
  for i, operation in enumerate([*OPERATIONS] * 2)
]


@pytest.mark.parametrize(('operation', 'inner', 'outer'), DRAWN)
def test_the_first_operation_is_named_with_its_line(operation, inner, outer):
  function, value, what = OPERATIONS[operation]

  def layer(x):
    with jax.named_scope('my_layer'):
      return function(x)  # the line

  lines, first = inspect.getsourcelines(layer)
  line = first + next(i for i, text in enumerate(lines) if 'the line' in text)
  whole = AROUND[inner](layer)
  if inner in ('loop', 'loop backwards') and outer in ('loop', 'loop backwards', 'vmap'):
    outer = 'plain'  # an element has no elements
  whole = AROUND[outer](whole)
  x = jnp.array([1.0, value, 2.0])
  found = origin_in(lambda x: (whole(2 * x / 2) * 3).sum() / 0.5 + jnp.nan_to_num(x), x)
  while found.cause:
    found = found.cause
  assert found.what == what
  assert 'my_layer' in found.place
  assert re.search(rf'test_not_finite_origin.py, line ({line}|{line_of(function)})\b', found.place)


def line_of(function):
  return getattr(getattr(function, '__code__', None), 'co_firstlineno', -1)


@pytest.mark.parametrize(
  ('operation', 'around'), [*itertools.product(['div', 'exp'], ['jit', 'loop'])]
)
def test_nan_of_an_infinite_number_names_both(operation, around):
  function, value, _ = OPERATIONS[operation]
  whole = AROUND[around](lambda x: function(x))
  found = origin_in(lambda x: whole(x) - whole(x), jnp.array([1.0, value]))
  assert found.what == 'NaN'
  assert found.place.startswith('sub')
  assert found.cause.what == 'an infinite number'
  assert found.cause.place.startswith(operation)


def test_of_a_gradient_it_is_the_backward_pass():
  found = origin_in(jax.grad(lambda x: 1e30 * (1e30 * x).sum()), jnp.zeros(3))
  assert 'mul in the backward pass (' in str(found)
  assert 'test_not_finite_origin.py' in str(found)


def test_masks_and_what_is_left_out_have_no_origin():
  mask = jnp.tri(3, dtype=bool)
  softmax = lambda x: jax.nn.softmax(jnp.where(mask, x, -jnp.inf))
  left_out = lambda x: jnp.where(x > 0, x, jnp.sqrt(-x))
  for function in (softmax, left_out, jax.grad(lambda x: softmax(x)[0, 0])):
    assert origin_in(function, jnp.ones((3, 3))) is None


def test_an_argument_that_is_not_finite_is_named():
  found = origin_in(lambda params: params['w'].sum(), {'w': jnp.array([jnp.nan])})
  assert str(found) == 'NaN by w'


class Root(FeedForward):
  def hidden(self, x_BTD):
    return jnp.sqrt(self.up(x_BTD, 'ffn_layer1'))  # of negative numbers, too


class RootGPT(TinyGPT):
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS = 'relu'

  def model(self):
    model = super().model()
    for layer in selectors.select(model, FeedForward):
      fdl.update_callable(layer, Root)
    return model


@pytest.mark.slow
def test_a_run_names_the_line_of_a_layer_of_the_user(tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_DEBUG_NANS', '1')
  config = f'{__name__}.RootGPT'
  said = runs.run(tmp_path, '--fdl.MAX_SKIPPED_STEPS=1', config=config, code=1).stderr
  *rest, last = said.splitlines()
  assert last.startswith('stopped: 1 step in a row had a non-finite gradient')
  line = inspect.getsourcelines(Root.hidden)[1] + 1
  place = rf'{re.escape(__file__)}, line {line}, in Root.hidden'
  assert re.search(rf'began with NaN by sqrt in transformer/x_layers_0/ff_layer \({place}\)$', last)
  assert 'Traceback' not in said
  assert any(x.startswith('JAX_DEBUG_NANS is ignored: MAX_SKIPPED_STEPS=1') for x in rest)
