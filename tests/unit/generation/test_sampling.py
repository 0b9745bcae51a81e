"""How the next token is chosen."""

import jax.numpy as jnp
import numpy as np

from paxlite.generation.sampling import likeliest


def test_the_likeliest_token_is_that_of_argmax():
  rng = np.random.default_rng(0)
  x_BV = rng.integers(-3, 4, (50, 40)).astype(np.float32)  # many are equal to the largest
  x_BV[0], x_BV[1, 5], x_BV[2, :-1] = -np.inf, np.inf, -np.inf
  found = likeliest(jnp.asarray(x_BV))
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, x_BV.argmax(-1))


def test_what_is_no_number_gives_a_token_of_the_vocabulary():
  assert likeliest(jnp.full((1, 7), jnp.nan)).tolist() == [6]
