"""Rows that share pages give the answers that rows with slots of their own give."""

import collections
import random

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.lfm import LFM2
from paxlite.experiments.llama import LLaMA
from paxlite.generation.cache import Pages
from paxlite.generation.engine import Engine
from paxlite.generation.page_pool import PagePool
from paxlite.generation.paged_cache import PagedScheduler
from paxlite.generation.request import Request
from paxlite.parallel import partitioning
from tests.unit.generation import test_engine, test_speculative

SIZE = 8
test_engine.MODELS['latent'] = DeepSeekV3(
  **test_engine.SMALL, HIDDEN_DIMS=48, NUM_DENSE_BLOCKS=2, LATENT_DIMS=8, QUERY_LATENT_DIMS=8,
  DIMS_PER_HEAD=4, ROTARY_DIMS_PER_HEAD=4, VALUE_DIMS_PER_HEAD=4, NUM_PREDICTION_MODULES=0,
)  # fmt: skip


def drawn(seed: int, count: int = 14, vocabulary: int = 90) -> list[Request]:
  """Returns requests of several lengths, of which some begin in the same way and some draw."""
  rng = np.random.default_rng(seed)
  ids = lambda most: rng.integers(1, vocabulary, rng.integers(1, most)).tolist()
  beginning = rng.integers(1, vocabulary, 20).tolist()
  return [
    Request(
      [*(beginning if rng.random() < 0.6 else []), *ids(20)], int(rng.integers(1, 22)),
      Sampling(float(i % 2)), seed=seed, sample=i, scored_from=0 if i == 5 else None,
      top_log_probs=int(i == 3),
    )
    for i in range(count)
  ]  # fmt: skip


class Checked:
  """Steps of an engine, after each of which the pages of all rows are counted."""

  def __init__(self, engine: Engine):
    self.engine, self.pauses, self.most_shared, self.waste = engine, 0, 0, []

  def answers(self, requests, at_a_time: int):
    waiting, jobs, step = collections.deque(requests), [], 0
    while waiting or any(job.answer is None for job in jobs):
      step += 1
      for _ in range(min(at_a_time, len(waiting))):
        jobs.append(self.engine.add(waiting.popleft()))
      before = [job for job in jobs if job.saved is not None]
      self.engine.step()
      self.pauses += len([j for j in jobs if j.saved is not None and j not in before])
      self.count(jobs)
      assert step < 500
    return [job.answer for job in jobs]

  def count(self, jobs) -> None:
    scheduler = self.engine._scheduler
    assert isinstance(scheduler, PagedScheduler)
    pool = scheduler.pages
    rows = [job for job in scheduler._jobs if job is not None]
    readers = collections.Counter(page for job in rows for page in job.pages)
    assert not any(job.pages for job in jobs if job not in rows)
    assert pool._readers == [readers[page] for page in range(pool.num_pages)]
    assert sorted([*pool._free, *readers]) == [*range(pool.num_pages)]
    for job in rows:  # a page that several rows read is full, and none of them writes into it
      shared = [page for page in job.pages if readers[page] > 1]
      self.most_shared = max(self.most_shared, len(shared))
      assert len(shared) * SIZE <= len(job.known) - 1


@pytest.mark.slow
@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('window', {}),
    ('repeated', dict(drafts=True)),
    ('states repeated', {}),
    ('linked', dict(kv_cache_dtype='int8')),
    ('latent', {}),
    ('glam', dict(steady=True)),
    ('module', dict(drafts=True)),
  ],
  ids=str,
)
def test_pages_give_what_slots_give(name, options):
  """Also where rows are taken from answers and given back, and whatever pages held before."""
  vocabulary = 90
  if name == 'module':
    model, params = test_speculative.model_and_params(share=0.5)
    vocabulary = 11
  else:
    model, params = test_engine.made(name)
  requests = drawn(0, vocabulary=vocabulary)
  expected = Engine(model, params, 64, most_rows=4, **options).generate(requests)
  engine = Checked(Engine(model, params, 64, most_rows=4, pages=Pages(9, SIZE), **options))
  found = engine.answers(requests, at_a_time=3)
  scores = lambda answers: [s.log_prob for a in answers for s in [*a.prompt_scores[1:], *a.scores]]
  assert [a.ids for a in found] == [a.ids for a in expected]
  np.testing.assert_allclose(scores(found), scores(expected), rtol=0, atol=2e-5)
  assert engine.pauses > 0
  if 'states' not in name:
    assert engine.most_shared > 0


@pytest.mark.slow
def test_rows_get_tables_and_more_slots_while_an_answer_waits():
  model, params = test_engine.made('llama')
  short = [Request([i + 1] * 20, 100) for i in range(4)]
  biased = Request([*range(2, 12)], 290, bias={7: 1.0})
  expected = [Engine(model, params, 320).generate([request])[0].ids for request in [*short, biased]]
  engine = Engine(model, params, 320, most_rows=4, pages=Pages(44, SIZE))
  jobs = [engine.add(request) for request in short]
  for _ in range(30):
    engine.step(most=4)
    if any(job.saved for job in jobs):
      break
  assert any(job.saved for job in jobs)
  assert engine._pool.slots == 128
  assert not engine._pool.tables
  jobs.append(engine.add(biased))
  assert any(engine.step() is False for _ in range(500))
  assert engine._pool.slots > 128
  assert [job.answer.ids for job in jobs] == expected


@pytest.mark.parametrize('seed', range(20))
def test_pages_are_neither_lost_nor_given_twice(seed):
  rng = random.Random(seed)
  pool, rows = PagePool(Pages(13, SIZE)), [[] for _ in range(5)]
  for _ in range(300):
    row = rng.choice(rows)
    kind = rng.randrange(3)
    if kind == 0:
      free, missing = pool.num_free, pool.missing(row, tokens := rng.randrange(60))
      assert pool.grow(row, tokens) == (missing <= free)
      assert len(row) * SIZE >= tokens or missing > free
    elif kind == 1:
      pool.release(row)
    elif not row:
      other = rng.choice(rows)
      row += pool.shared(other, min(len(other) * SIZE, rng.randrange(60)))
    readers = collections.Counter(page for row in rows for page in row)
    assert pool._readers == [readers[page] for page in range(13)]
    assert sorted([*pool._free, *readers]) == [*range(13)]


def test_samples_of_one_prompt_store_it_once():
  model, params = test_engine.made('window')
  engine = Engine(model, params, 64, most_rows=4, pages=Pages(12, SIZE))
  prompt = [*range(2, 42)]
  checked = Checked(engine)
  answers = checked.answers(
    [Request(prompt, 8, seed=i, sampling=Sampling(1.0)) for i in range(4)], 4
  )
  assert checked.pauses == 0  # 4 pages of the prompt, and two for each answer; apart they need 24
  assert [a.shared for a in answers] == [0, 32, 32, 32]


@pytest.mark.slow
def test_rounds_that_users_of_other_servers_reported():
  """On one engine, in turn; each round gives what rows with slots give.

  A prompt again, whose beginning is shared (tenstorrent/vllm 415, tanishqkumar/ssd 23); after one
  that needed all pages (local-inference-lab/vllm 480, ovg-project/kvcached 362); twice at a time
  (Wenyueh/MinivLLM 98); more long prompts than there are pages for, after short ones (vllm 35541);
  and answers that fill all pages and have to wait for each other (vllm 1607).
  """
  model, params = test_engine.made('llama')
  beginning = [*range(2, 35)]
  of = lambda *prompts, most=6: [Request([*prompt], most) for prompt in prompts]
  rounds = [
    of(beginning), of(beginning), of([9] * 57), of(beginning), of(beginning, beginning),
    of(*([i] for i in range(1, 7))), of(*([i, *beginning, *[7] * 20] for i in range(5))),
    of(*([i + 3] * 3 for i in range(6)), most=58),
  ]  # fmt: skip
  expected = Engine(model, params, 64, most_rows=4)
  engine = Engine(model, params, 64, most_rows=4, pages=Pages(9, SIZE))
  for number, requests in enumerate(rounds):
    jobs = [engine.add(request) for request in requests]
    assert any(engine.step() is False for _ in range(200)), number
    assert [job.answer.ids for job in jobs] == [a.ids for a in expected.generate(requests)], number


def test_a_scored_prompt_may_fill_all_pages():
  model, params = test_engine.made('window')
  engine = Engine(model, params, 64, most_rows=2, pages=Pages(8, SIZE))
  job = engine.add(Request([1] * 64, 0, scored_from=1))
  assert any(engine.step() is False for _ in range(9))
  assert len(job.answer.prompt_scores) == 63


def test_what_pages_do_not_support():
  model, params = test_engine.made('window')
  with pytest.raises(UserError, match=r'has 56 tokens, .* may have 64: raise it, or lower MAX_SE'):
    Engine(model, params, 64, pages=Pages(7, SIZE))
  mesh = LLaMA(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1]).mesh(jax.devices()[:1])
  split = partitioning.rules_for(['replica', 'data', 'mdl'])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(partitioning, 'num_shards', lambda *_: 2)
    with pytest.raises(UserError, match='splits rows over 2: give the devices to the axis mdl'):
      Engine(model, params, 64, mesh=mesh, rules=split, pages=Pages(9, SIZE))
  states = LFM2(**test_engine.SMALL, ATTENTION_PATTERN=['short_convolution'], NUM_KV_HEADS=1)
  model = fdl.build(states.build_task()).model
  params = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32)))
  with pytest.raises(UserError, match=r'keeps states alone: leave it out'):
    Engine(model, params['params'], 64, pages=Pages(9, SIZE)).cache_bytes(1, 1)
