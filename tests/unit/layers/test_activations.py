"""Activation functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import activations


@pytest.mark.parametrize(('platform', 'has_tanh'), [('cpu', True), ('gpu', False)])
def test_gelu_and_its_derivative_are_those_of_the_formula(monkeypatch, platform, has_tanh):
  """GPUs compute it with a sigmoid, which XLA does not write to memory."""
  monkeypatch.setattr(activations, 'active_platform', lambda: platform)
  x = jnp.linspace(-12, 12, 4801)
  gelu = jax.vmap(jax.value_and_grad(activations.gelu))
  assert ('tanh' in str(jax.make_jaxpr(gelu)(x))) == has_tanh
  exact = np.linspace(-12, 12, 4801)
  inner = np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)
  share = 1 / (1 + np.exp(-2 * inner))
  slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * exact**2)
  value, derivative = gelu(x)
  np.testing.assert_allclose(value, exact * share, atol=1e-6)
  np.testing.assert_allclose(derivative, share + exact * share * (1 - share) * slope, atol=2e-5)
