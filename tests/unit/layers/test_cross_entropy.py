"""The loss of each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import cross_entropy as module


@pytest.mark.slow
@pytest.mark.parametrize('cap', [0.0, 3.0])
def test_gpus_compute_capped_logits_again_with_the_same_bits(monkeypatch, cap):
  """The barriers keep XLA from writing a tanh [B, T, V]; without a cap there are none."""
  logits_BTV = 4 * jax.random.normal(jax.random.key(0), (2, 3, 50))
  labels_BT = jax.random.randint(jax.random.key(1), (2, 3), 0, 50)

  def results(platform):
    monkeypatch.setattr(module, 'active_platform', lambda: platform)

    def value(logits_BTV):
      return module.cross_entropy(logits_BTV, labels_BT, cap).xent.sum()

    text = str(jax.make_jaxpr(jax.grad(value))(logits_BTV))
    return text.count('optimization_barrier'), jax.value_and_grad(value)(logits_BTV)

  on_cpu, on_gpu = results('cpu'), results('gpu')
  assert (on_cpu[0], on_gpu[0]) == (0, 2 if cap else 0)
  jax.tree.map(np.testing.assert_array_equal, on_cpu[1], on_gpu[1])
  capped = cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV
  xent = -jnp.take_along_axis(jax.nn.log_softmax(capped), labels_BT[..., None], -1).sum()
  np.testing.assert_allclose(on_gpu[1][0], xent, rtol=1e-6)
