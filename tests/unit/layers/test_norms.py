"""LayerNorm, whose moments GPUs compute once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers import norms


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_layer_norm_and_its_gradients_are_those_of_the_formula(monkeypatch, platform):
  """Also where the mean is 100 times the deviation; only GPUs have a barrier at the moments."""
  monkeypatch.setattr(norms, 'active_platform', lambda: platform)
  x_BTD = 100 + jax.random.normal(jax.random.key(0), (2, 5, 64))
  g_BTD = jax.random.normal(jax.random.key(1), x_BTD.shape)
  module = norms.LayerNorm()
  params = {k: jax.random.normal(jax.random.key(2), (64,)) for k in ('scale', 'bias')}

  def formula(params, x):
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return y * (1 + params['scale']) + params['bias']

  def gradients(function):
    return jax.jit(jax.grad(lambda *args: (function(*args) * g_BTD).sum(), (0, 1)))(params, x_BTD)

  ours = lambda params, x: module.apply({'params': params}, x)
  text = str(jax.make_jaxpr(ours)(params, x_BTD))
  assert ('optimization_barrier' in text) == (platform == 'gpu')
  np.testing.assert_allclose(ours(params, x_BTD), formula(params, x_BTD), rtol=1e-5, atol=1e-5)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, gradients(ours), gradients(formula))
