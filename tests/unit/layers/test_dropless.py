"""Dropless experts: products of groups of rows, slots, and the way between devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers.moe import blocked_matmul, dropless, megablox_matmul, moe


@pytest.fixture(autouse=True)
def highest_precision():
  with jax.default_matmul_precision('highest'):
    yield


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [(256, 0, 512), (256, 0, 1024)])  # of 1280 rows
@pytest.mark.parametrize(
  ('kernels', 'platform', 'product'),
  [
    (blocked_matmul, 'gpu', blocked_matmul.product),
    (megablox_matmul, 'tpu', functools.partial(megablox_matmul.product, interpret=True)),
  ],
)
def test_kernels_compute_what_ragged_dot_does(kernels, platform, product, sizes, monkeypatch):
  """Compares results and both gradients, with an empty group, and rows without a group.

  Blocks are multiplied three at a time: the second chunk is skipped, or begins in the first one.
  """
  monkeypatch.setattr(blocked_matmul, '_COPIES', 1)
  sizes = jnp.array(sizes)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(1280, 128)), jnp.float32)
  w = jnp.asarray(0.1 * rng.normal(size=(3, 128, 128)), jnp.float32)
  assert kernels.refusal(w, platform, 1024) is None
  assert kernels.refusal(w, 'cpu', 1024)
  is_grouped = (jnp.arange(1280) < sizes.sum())[:, None]

  def value(product, x, w):
    y = jnp.where(is_grouped, product(x, w, sizes), 0)
    return jnp.sin(y).sum(), y

  grad = jax.jit(jax.value_and_grad(value, (1, 2), has_aux=True), static_argnums=0)
  (_, y), (dx, dw) = grad(product, x, w)
  (_, y2), (dx2, dw2) = grad(jax.lax.ragged_dot, x, w)
  np.testing.assert_allclose(y, y2, atol=2e-6, rtol=2e-6)
  np.testing.assert_allclose(jnp.where(is_grouped, dx, 0), dx2, atol=2e-6, rtol=2e-6)
  np.testing.assert_allclose(dw, dw2, atol=5e-5)
  np.testing.assert_array_equal(dw[1], 0)


@pytest.mark.parametrize('shape', [(3, 100, 128), (3, 128, 100)])
def test_kernels_refuse_what_they_do_not_divide(shape):
  w = jnp.zeros(shape)
  assert 'sizes divisible by 128' in megablox_matmul.refusal(w, 'tpu', 1024)


def test_a_few_rows_are_not_worth_copies_of_the_matrices():
  w = jnp.zeros((3, 4, 4))
  assert 'more than 512 choices' in blocked_matmul.refusal(w, 'gpu', 512)
  assert blocked_matmul.refusal(w, 'gpu', 513) is None


def output_and_gradients(layer, params, x, paddings):
  def value(params, x):
    y = layer.apply({'params': params}, x, paddings, mutable=['losses', 'summaries'])[0]
    return jnp.sin(y).sum(), y

  (_, y), grads = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))(params, x)
  return y, grads


@pytest.mark.slow
def test_groups_of_multiples_give_the_same(monkeypatch):
  """Accelerators pad groups to multiples; what kernels leave in other rows reaches nothing."""
  layer = moe.MoeFeedForward(16, 32, num_experts=4, dispatch_tpl=dropless.DroplessDispatch)
  x = jax.random.normal(jax.random.key(1), (4, 8, 16))
  paddings = jnp.zeros((4, 8)).at[1, 5:].set(1)
  params = jax.jit(layer.init)(jax.random.key(0), x, paddings)['params']
  params = jax.tree.map(lambda p: p.value if hasattr(p, 'value') else p, params)
  expected = output_and_gradients(layer, params, x, paddings)
  shapes_seen = []

  @jax.custom_vjp
  def dirty(x_PD, sizes_E):
    return jnp.where(jnp.arange(len(x_PD))[:, None] < sizes_E.sum(), x_PD, jnp.nan)

  dirty.defvjp(lambda x, sizes: (dirty(x, sizes), sizes), lambda s, dy: (dirty(dy, s), None))

  def product(x_PD, w_EDF, sizes_E, num_choices):
    shapes_seen.append(x_PD.shape)
    clean = jnp.where(jnp.arange(len(x_PD))[:, None] < sizes_E.sum(), x_PD, 0)
    return dirty(jax.lax.ragged_dot(clean, w_EDF, sizes_E), sizes_E)

  monkeypatch.setattr(dropless, 'alignment', lambda w, num_choices: 8)
  monkeypatch.setattr(dropless, 'grouped_matmul', product)
  found = output_and_gradients(layer, params, x, paddings)
  assert shapes_seen[0][0] == 96  # 64 choices, and 7 more slots for each of 4 experts
  close = functools.partial(np.testing.assert_allclose, atol=2e-6)
  jax.tree.map(close, found, expected)


def test_slots_are_in_the_order_of_experts_and_of_tokens():
  choice, counts = dropless._sorted(jnp.array([2, 0, 5, 2, -1, 0]), 3)
  assert counts.tolist() == [2, 0, 2]
  permutation = dropless._permutation(choice, counts, jnp.array([4, 0, 4]), num_slots=12)
  assert permutation.slot_R.tolist() == [4, 0, 12, 5, 12, 1]
  none = 6
  assert permutation.choice_P.tolist() == [1, 5, none, none, 0, 3, none, none] + [none] * 4


def test_an_expert_that_overflows_for_others_has_finite_gradients(monkeypatch):
  """Its free slots hold the last token."""
  monkeypatch.setattr(dropless, 'alignment', lambda w, num_choices: 8)
  x, experts = jnp.ones((1, 4, 2)).at[0, 0].set(0), jnp.array([1, 0, 0, 0]).reshape(1, 4, 1)
  weights = moe.Weights((jnp.ones((2, 2, 3)).at[1].set(3e38),), jnp.ones((2, 3, 2)), (), ())
  loss = lambda w: dropless._local(x, experts, jnp.ones((1, 4, 1)), w, jax.nn.silu, 0).sum()
  assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(weights)))
