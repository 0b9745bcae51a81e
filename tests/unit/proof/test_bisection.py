"""Where two batches differ."""

import jax.numpy as jnp

from paxlite.proof.bisection import _other_batches


def test_zeros_of_two_signs_are_a_difference():
  one = {'weights': jnp.zeros((2, 3))}
  other = {'weights': jnp.zeros((2, 3)).at[1, 2].set(-0.0)}
  assert _other_batches(one, one) == ''
  found = 'weights in 1 of 2 rows, first in row 1 at position [2]: 0.0 in A, -0.0 in B.'
  assert _other_batches(one, other).startswith(found)


def test_another_dtype_is_named():
  one, other = {'ids': jnp.ones((2, 3), int)}, {'ids': jnp.ones((2, 3))}
  assert _other_batches(one, other) == 'ids is int32[2, 3] in A and float32[2, 3] in B'
