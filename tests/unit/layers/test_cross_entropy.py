"""The loss of each token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import cross_entropy as module


@pytest.mark.parametrize('cap', [0.0, 3.0])
def test_gpus_read_the_logits_once_forward(monkeypatch, cap):
  """A barrier keeps XLA from writing a tanh [B, T, V]; without a cap there is none."""
  logits_BTV = 4 * jax.random.normal(jax.random.key(0), (2, 3, 50))
  labels_BT = jax.random.randint(jax.random.key(1), (2, 3), 0, 50)

  def results(platform):
    monkeypatch.setattr(module, 'active_platform', lambda: platform)

    def value(logits_BTV):
      return module.cross_entropy(logits_BTV, labels_BT, cap).xent.sum()

    text = str(jax.make_jaxpr(jax.grad(value))(logits_BTV))
    return text.count('optimization_barrier'), jax.value_and_grad(value)(logits_BTV)

  on_cpu, on_gpu = results('cpu'), results('gpu')
  assert (on_cpu[0], on_gpu[0]) == (0, 1 if cap else 0)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
  jax.tree.map(close, on_cpu[1], on_gpu[1])
  # with the sums of two passes, the barrier changes no bit
  monkeypatch.setattr(module, '_in_one_pass', module._in_two_passes)
  jax.tree.map(np.testing.assert_array_equal, on_cpu[1], results('gpu')[1])
  capped = cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV
  xent = -jnp.take_along_axis(jax.nn.log_softmax(capped), labels_BT[..., None], -1).sum()
  np.testing.assert_allclose(on_gpu[1][0], xent, rtol=1e-6)


@pytest.mark.parametrize('scale', [1.0, 1e4])
def test_one_pass_over_the_logits_is_as_exact_as_two(scale):
  """Also where the first logits are −∞, the largest one is the last, and in bfloat16."""
  logits = scale * np.random.default_rng(0).normal(size=(4, 1000))
  logits[1, :3], logits[2] = -np.inf, np.sort(logits[2])
  exact = np.logaddexp.reduce(logits, 1)
  largest, log_z = module._in_one_pass(jnp.asarray(logits, jnp.float32))
  np.testing.assert_allclose(largest, logits.max(1), rtol=1e-6)
  np.testing.assert_allclose(log_z, exact, rtol=1e-6)
  np.testing.assert_allclose(
    module._in_two_passes(jnp.asarray(logits, jnp.float32))[1], exact, 1e-6
  )
