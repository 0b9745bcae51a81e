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


@pytest.mark.slow
def test_several_blocks_of_a_matrix_give_the_exact_product(monkeypatch):
  """Sums of small integers have no rounding; a block has rows of two groups."""
  monkeypatch.setattr(megablox_matmul, '_LEAST_CONTRACTED', 128)
  monkeypatch.setattr(megablox_matmul, '_VMEM', 2**20)
  for D, F in (256, 384), (384, 256):
    assert megablox_matmul.block(2048, D, F, 2, 4)[0] == 256
    assert min(D, F) > max(megablox_matmul.block(2048, D, F, 2, 4)[1:])
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)
  x, w, dy, sizes = drawn(2048, 256), drawn(2, 256, 384), drawn(2048, 384), jnp.array([1152, 896])

  def results(product):
    y, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return y, *pull(dy)

  found = results(functools.partial(megablox_matmul.product, interpret=True))
  jax.tree.map(np.testing.assert_array_equal, found, results(jax.lax.ragged_dot))


@pytest.mark.parametrize('is_gradient', [False, True])
def test_a_block_is_the_best_that_fits(is_gradient):
  """Compares with all blocks of multiples of 128, of shapes that are drawn."""
  rng = np.random.default_rng(is_gradient)
  for _ in range(20):
    E, D, F = rng.integers(1, 9), *(128 * rng.integers(1, 25, size=2))
    P = 128 * int(rng.integers(E, 100 * E))
    found = megablox_matmul.block(P, D, F, E, 2, is_gradient)
    rows = found[0]
    read = {}
    for d in range(128, D + 1, 128):
      for f in range(128, F + 1, 128):
        times_x, times_other = -(-F // f), -(-D // d)
        size = 4 * (rows * d + d * f + rows * f) + 4 * (d if is_gradient else rows) * f
        matrices = P * F * times_other if is_gradient else D * F * (E if d == D else P // rows)
        if size <= 12 * 2**20 and (is_gradient or d >= min(D, 512)):
          read[rows, d, f] = D % d + F % f > 0, P * D * times_x + matrices
    assert read[found] == min(read.values())
    assert P % rows == 0
    assert rows == 128 or rows * 4 * E <= P


def test_matrices_of_small_experts_are_read_once():
  """If 128 rows read their matrix again, that takes longer than their product."""
  P, D, F = 1151 * 128, 2048, 768  # of Qwen3-30B-A3B, with four sequences of 4,096 tokens
  for contracted, columns in (D, 2 * F), (F, D), (D, F), (2 * F, D):
    assert megablox_matmul.block(P, contracted, columns, 128, 2)[1] == contracted


def test_rows_that_a_policy_keeps_are_not_copied():
  product = lambda x, w: megablox_matmul.product(x * 2, w, jnp.array([128]), True)
  kept = jax.checkpoint(product, policy=jax.checkpoint_policies.everything_saveable)
  x, w = jnp.ones((128, 128)), jnp.ones((1, 128, 128))
  text = str(jax.make_jaxpr(jax.grad(lambda x: kept(x, w).sum()))(x))
  assert 'reduce_precision' not in text


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
