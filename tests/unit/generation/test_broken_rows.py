"""A request whose numbers become NaN changes no other answer, nor those of later requests."""

import jax.numpy as jnp
import pytest

from paxlite.generation.cache import Pages
from paxlite.generation.engine import Engine
from paxlite.generation.request import Request
from tests.unit.generation import test_engine

BAD = 50


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('llama', {}),
    *(
      pytest.param(*given, marks=pytest.mark.slow)
      for given in [
        ('llama', dict(slots=64)),
        ('llama', dict(pages=Pages(10, 8))),
        ('repeated', dict(kv_cache_dtype='float8_e4m3fn')),
        ('states', dict(steady=True)),
      ]
    ),
  ],
  ids=str,
)
def test_a_row_of_nan_is_not_read_by_its_next_request(name, options):
  model, params = test_engine.made(name)
  table = params['embedding']['emb_var']
  assert 'softmax' in params  # the embedding is not the logits' weight, too
  broken = {**params, 'embedding': {'emb_var': table.at[BAD].set(jnp.nan)}}
  good = [Request([*range(1, 11)], 6), Request([*range(1, 30)], 6)]
  expected = [a.ids for a in Engine(model, params, 64, most_rows=2, **options).generate(good)]
  engine = Engine(model, broken, 64, most_rows=2, **options)
  # two that fill both rows with NaN, one beside a good one, and one that begins like a good one
  bad = [Request([BAD] * 30, 4), Request([BAD] * 40, 2), Request([*range(1, 25), BAD, BAD], 9)]
  answers = [*engine.generate(bad[:2]), *engine.generate([good[1], bad[2]])]
  assert [a.scores[0].log_prob == a.scores[0].log_prob for a in answers] == [
    False, False, True, False,
  ]  # fmt: skip
  assert [a.ids for a in engine.generate(good)] == expected
  assert answers[2].ids == expected[1]
