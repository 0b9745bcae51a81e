"""After a warm-up, no request needs a further program."""

import dataclasses

import jax
import numpy as np
import pytest

from paxlite.generation.engine import Engine
from paxlite.generation.request import Request
from paxlite.generation.warm_up import warm_up
from tests.unit.generation.test_engine import Rising, made
from tests.unit.generation.test_sampling import drawn_requests

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, seconds, **_: COMPILED.append(event) if 'backend_compile' in event else None
)


def requests(seed: int, count: int) -> list[Request]:
  """Returns requests with options, lengths and beginnings of all kinds."""
  rng = np.random.default_rng(seed)
  beginning = rng.integers(3, 90, 24).tolist()
  found = []
  for request in drawn_requests(rng, count):
    prompt = rng.integers(3, 90, rng.integers(1, 40)).tolist()
    if rng.random() < 0.3:
      prompt = beginning + prompt[:10]
    most = int(rng.integers(request.min_tokens, 20))
    scored = int(rng.integers(0, len(prompt))) if rng.random() < 0.2 else None
    grammar = Rising() if rng.random() < 0.1 else None
    found.append(
      dataclasses.replace(
        request, prompt=prompt, max_tokens=most, scored_from=scored, grammar=grammar
      )
    )
  return found


@pytest.mark.slow
def test_requests_of_all_kinds_need_no_further_program():
  model, params = made('llama')
  engine = Engine(model, params, 64, most_rows=4, steady=True)
  warm_up(engine)
  before = len(COMPILED)
  assert before
  together = engine.generate(requests(0, 48))
  alone = [engine.generate([request])[0] for request in requests(0, 48)[:12]]
  assert len(COMPILED) == before
  assert [a.ids for a in alone] == [a.ids for a in together[:12]]
  assert engine._compiled.decode._cache_size() == 2 * len(engine.row_levels)
