"""Products in FP8: the numbers and the state of Flax, and no history inside of a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from paxlite.layers.remat import jax_policy
from paxlite.quantization.fp8_matmul import Fp8DotGeneral, begin_step

# Shapes of activations and weights with their dimension numbers: a wider and a narrower result,
# two dimensions that are summed over, experts as a batch dimension, and combined queries, keys and
# values, which are computed one by one.
WIDER = (4, 8, 16), (16, 24), (((2,), (0,)), ((), ()))
NARROWER = (4, 8, 6, 4), (6, 4, 16), (((2, 3), (0, 1)), ((), ()))
EXPERTS = (4, 3, 8, 16), (3, 16, 24), (((3,), (1,)), ((1,), (0,)))
COMBINED = (4, 8, 16), (16, 3, 2, 8), (((2,), (0,)), ((), ()))


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  ('case', 'dtype', 'has_bias'),
  [
    (WIDER, 'bfloat16', True),
    (NARROWER, 'bfloat16', False),
    (EXPERTS, 'float32', False),
    (COMBINED, 'bfloat16', True),
  ],
)
def test_numbers_and_states_are_those_of_flax(case, dtype, has_bias):
  """In five steps, whose activations grow and whose output gradients shrink."""
  x_shape, w_shape, dims = case
  keys = jax.random.split(jax.random.key(0), 3)
  w = jax.random.normal(keys[1], w_shape, dtype)
  made = w_shape[len(dims[0][1]) + len(dims[1][1]) :]
  bias = jax.random.normal(keys[1], made, dtype) if has_bias else None
  ours, flax = Fp8DotGeneral(), fp8_ops.Fp8DirectDotGeneralOp()

  def our_product(state, x, w, b):
    return ours.apply(begin_step(state), x, w, dims, b)

  def its_product(state, x, w, b):
    y = flax.apply(state, x, w, dims)
    return y if b is None else y + b

  def gradients(product):
    def loss(state, x, w, b, g):
      y = product(state, x, w, b)
      return (y.astype(jnp.float32) * g).sum(), y

    return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))

  steps = gradients(our_product), gradients(its_product)
  x = jnp.zeros(x_shape, dtype)
  states = [module.init(keys[0], x, w, dims) for module in (ours, flax)]
  for i in range(5):
    x = (i + 1) * jax.random.normal(jax.random.fold_in(keys[0], i), x_shape, dtype)
    g = jax.random.normal(keys[2], jax.lax.dot_general(x, w, dims).shape) / 10**i
    results = [step(state, x, w, bias, g) for step, state in zip(steps, states, strict=True)]
    ((our_state, our_x, our_w, our_b), our_y), ((state, its_x, its_w, its_b), its_y) = results
    jax.tree.map(np.testing.assert_array_equal, (our_state, our_x, our_y), (state, its_x, its_y))
    if has_bias:  # Flax's is summed in bfloat16, and is less exact
      exact = g.astype(dtype).astype(jnp.float32).sum(range(g.ndim - len(made))).astype(dtype)
      np.testing.assert_array_equal(our_b, exact)
      assert jnp.abs(our_b - its_b).max() <= 0.03 * jnp.abs(its_b).max()
    # For CPUs, XLA of jax 0.12 sums Flax's bfloat16 gradient of a weight in bfloat16.
    error = jnp.abs(our_w - its_w).max() / jnp.abs(its_w).max()
    assert error <= (0.016 if dtype == 'bfloat16' else 0)
    states = our_state, state


def test_a_loop_neither_reads_nor_writes_histories():
  layers = 3
  x, w, dims = jnp.ones((8, 16)), jnp.ones((layers, 16, 16)), (((1,), (0,)), ((), ()))
  module = Fp8DotGeneral()
  one = module.init(jax.random.key(0), x, w[0], dims)
  state = jax.tree.map(lambda a: jnp.stack([a] * layers), one)

  def loss(state):
    body = lambda x, layer: (module.apply(layer[0], x, layer[1], dims), None)
    return jax.lax.scan(body, x, (begin_step(state), w))[0].sum()

  program = jax.make_jaxpr(jax.grad(loss))(state)
  loops = [eqn for eqn in program.eqns if eqn.primitive.name == 'scan']
  assert len(loops) == 2
  assert '1024' in str(program)
  assert not any('1024' in str(eqn) for eqn in loops)


def test_the_largest_values_of_the_forward_pass_are_kept():
  """By a policy that keeps nothing else, the backward pass computes that of the gradient alone."""
  x, w, dims = jnp.ones((8, 16)), jnp.ones((16, 16)), (((1,), (0,)), ((), ()))
  module = Fp8DotGeneral()
  step = begin_step(module.init(jax.random.key(0), x, w, dims))

  @functools.partial(jax.checkpoint, policy=jax_policy('SAVE_NOTHING'))
  def product(step, x, w):
    return module.apply(step, x, w, dims)

  loss = lambda *args: product(*args).sum()
  program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(step, x, w)
  (backward,) = [eqn for eqn in program.eqns if 'policy' in eqn.params]
  assert str(backward).count('reduce_max') == 1
