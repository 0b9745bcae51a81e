"""States that devices pass on, where rows are split over them, give what whole rows give.

`python -m tests.unit.experiments.test_context_states` compares on 8 devices of a CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from paxlite.experiments.hybrid.chunked_scan import linear_attention
from paxlite.experiments.hybrid.context_states import is_split, linear_attention_over_context
from paxlite.parallel import partitioning
from tests.support import runs

AXES = 'replica', 'data', 'mdl', 'context'
B, T, N, K, V = 2, 400, 2, 8, 6


def value_and_gradients(function, args, *others):
  def loss(*args):
    read = function(*args, *others)
    return jnp.sin(read).sum(), read

  with jax.default_matmul_precision('highest'):
    run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    gradients, read = run(*args)
  return [read, *gradients]


def compare(is_packed: bool, has_delta: bool) -> float:
  """Returns the largest difference, as a share of the largest value of its array."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  q, k, v = normal(B, T, N, K), normal(B, T, N, K), normal(B, T, N, V)
  k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
  args = q, k, v, -jnp.exp(normal(B, T, N) - 3)  # states that last
  beta = 2 * jax.nn.sigmoid(normal(B, T, N)) if has_delta else None
  ids = jnp.asarray(np.cumsum(rng.random((B, T)) < 0.01, 1) + 1) if is_packed else None
  whole = value_and_gradients(lambda *a: linear_attention(*a)[0], args, beta, ids)
  mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 2, 4), AXES)
  with partitioning.activate(mesh, partitioning.rules_for(AXES)):
    assert is_split()
    split = value_and_gradients(linear_attention_over_context, args, beta, ids)
  return max(float(abs(x - y).max() / abs(y).max()) for x, y in zip(split, whole, strict=True))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_devices_pass_on_their_states():
  done = runs.module('tests.unit.experiments.test_context_states', devices=8)
  assert done.stdout.split() == ['equal'] * 4


if __name__ == '__main__':
  for is_packed in (False, True):
    for has_delta in (True, False):
      assert compare(is_packed, has_delta) < 1e-5
      print('equal')
