"""How differences of two states are shown and ordered."""

import jax.numpy as jnp

from paxlite.proof.state_differences import differences


def test_arrays_that_are_not_finite_come_first():
  one = {'a': jnp.ones(3), 'b': jnp.ones(3), 'c': jnp.ones(3), 'd': jnp.ones(3)}
  other = {
    'a': jnp.array([1, 1, 1.5]), 'b': jnp.array([1, 1, jnp.nan]), 'c': jnp.array([1, 1, 9.0]),
    'd': jnp.array([1, jnp.inf, 1]),
  }  # fmt: skip
  found = sorted(differences(one, other), key=lambda d: d.rank, reverse=True)
  assert [d.name for d in found] == ['b', 'd', 'c', 'a']
  assert [d.differing for d in found] == [1, 1, 1, 1]
