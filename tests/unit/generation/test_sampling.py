"""How the next token is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.config.generation import Sampling
from paxlite.generation import options
from paxlite.generation.request import Request
from paxlite.generation.sampling import chosen, likeliest


def test_the_likeliest_token_is_that_of_argmax():
  rng = np.random.default_rng(0)
  x_BV = rng.integers(-3, 4, (50, 40)).astype(np.float32)  # many are equal to the largest
  x_BV[0], x_BV[1, 5], x_BV[2, :-1] = -np.inf, np.inf, -np.inf
  found = likeliest(jnp.asarray(x_BV))
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, x_BV.argmax(-1))


def test_what_is_no_number_gives_a_token_of_the_vocabulary():
  assert likeliest(jnp.full((1, 7), jnp.nan)).tolist() == [6]


V = 60


def drawn_requests(rng: np.random.Generator, count: int) -> list[Request]:
  """Returns requests of which each has some options, drawn at random."""
  found = []
  for i in range(count):
    values = dict(
      temperature=rng.choice([0.0, 0.7, 1.5]), top_k=rng.choice([0, 1, 5]),
      top_p=rng.choice([1.0, 0.6]), min_p=rng.choice([0.0, 0.1]),
      repetition_penalty=rng.choice([1.0, 1.4]), presence_penalty=rng.choice([0.0, 0.5]),
      frequency_penalty=rng.choice([0.0, -0.3]),
    )  # fmt: skip
    kept = {k: v.item() for k, v in values.items() if rng.random() < 0.5}
    bias = {int(t): 3.0 for t in rng.integers(0, V, 4)} if rng.random() < 0.3 else {}
    found.append(
      Request(
        rng.integers(0, V, 5).tolist(), 9, Sampling(**kept), seed=i, bias=bias,
        min_tokens=int(rng.integers(0, 3)), ends=[int(rng.integers(V))],
        top_log_probs=int(rng.choice([0, 3])),
      )
    )  # fmt: skip
  return found


@pytest.mark.parametrize('seed', range(3))
def test_what_is_chosen_for_a_row_does_not_depend_on_the_options_of_others(seed):
  """Bit for bit, and a row without options has the same in both variants."""
  rng = np.random.default_rng(seed)
  asked = drawn_requests(rng, 12)
  logits = rng.normal(size=(12, V)).astype(np.float32) * 2
  choose = jax.jit(chosen, static_argnums=4)

  def chosen_for(rows, full=True):
    requests, number = [asked[i] for i in rows], np.full(len(rows), 2, np.int32)
    given = options.choices(requests, full, V), number, np.ones(len(rows), bool), full
    allowed = np.ones((len(rows), V), bool) if full else None
    return choose(logits[rows], *given, None, allowed)

  together = chosen_for([*range(12)])
  for i, request in enumerate(asked):
    alone = chosen_for([i])
    assert alone.token[0] == together.token[i]
    assert alone.log_prob[0] == together.log_prob[i]
    if request.top_log_probs:
      np.testing.assert_array_equal(alone.top_ids[0], together.top_ids[i])
      np.testing.assert_array_equal(alone.top_log_probs[0], together.top_log_probs[i])
    if not options.needs_full([request]):
      assert chosen_for([i], full=False).token[0] == together.token[i]
