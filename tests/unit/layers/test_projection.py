"""Initial values of projections."""

import functools

import jax
import numpy as np
import pytest
from flax.core import meta

from paxlite.layers.projection import Projection
from paxlite.quantization.quantized_projection import QuantizedProjection
from paxlite.quantization.schemes import Int8


def test_a_bias_does_not_change_the_initial_weight():
  """The weight is declared first: the order of declarations decides the random keys."""
  x = np.ones((2, 3, 8), np.float32)

  def weight(use_bias):
    module = Projection('BTD,DF->BTF', (8, 6), ('embed', 'mlp'), use_bias=use_bias)
    return meta.unbox(module.init(jax.random.key(0), x))['params']['w']

  np.testing.assert_array_equal(weight(True), weight(False))


@pytest.mark.parametrize('cls', [Projection, functools.partial(QuantizedProjection, scheme=Int8())])
def test_a_bias_has_the_dimensions_of_the_output(cls):
  module = cls('BTD,ADNH->BTANH', (3, 8, 2, 4), ('qkv', 'embed', 'heads', 'head_dim'))
  x = np.ones((2, 5, 8), np.float32)
  params = meta.unbox(module.init(jax.random.key(0), x))['params']
  bias = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
  with_bias, without = (module.apply({'params': params | {'b': b}}, x) for b in (bias, 0 * bias))
  np.testing.assert_allclose(with_bias - without, np.broadcast_to(bias, (2, 5, 3, 2, 4)), atol=1e-6)
