"""The engine's tokens equal those of recomputation, whatever else it generates."""

import functools
import subprocess
import sys
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import pytest
from fiddle import selectors
from flax.linen import meta

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.eval.scoring import Continuation, Scorer
from paxlite.experiments.gemma4 import Gemma4
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.qwen_hybrid import Qwen3_5
from paxlite.generation.engine import Engine
from paxlite.generation.request import Request
from paxlite.generation.sampling import filtered
from paxlite.generation.spelling import shown
from paxlite.layers.attention.attention import Attention
from tests.support import runs
from tests.support.engines import engine_of

SMALL = dict(NUM_LAYERS=2, NUM_HEADS=4, MODEL_DIMS=32, VOCAB_SIZE=97, MAX_SEQ_LEN=64,
             FPROP_DTYPE='float32')  # fmt: skip
LLAMA = SMALL | dict(NUM_KV_HEADS=2, HIDDEN_DIMS=48)
SHALLOW = dict(NUM_LAYERS=1, USE_REPEATED_LAYER=False)  # compiles in half the time
MODELS = {
  'gpt': GPT126M(**SMALL | SHALLOW),
  'llama': LLaMA(**LLAMA | SHALLOW),
  'repeated': LLaMA(**LLAMA),
  'window': LLaMA(**LLAMA, USE_REPEATED_LAYER=False, SLIDING_WINDOW=6),
  'glam': GLaM126M64E(**SMALL, NUM_EXPERTS=4, USE_DROPLESS_MOE=True, USE_REPEATED_LAYER=True),
  'pipeline': LLaMA(
    **LLAMA, MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1]
  ),
  'bfloat16': LLaMA(**(LLAMA | dict(FPROP_DTYPE='bfloat16')), USE_REPEATED_LAYER=False),
}
HYBRID = SMALL | dict(
  NUM_LAYERS=4, NUM_KV_HEADS=1, DIMS_PER_HEAD=8, HIDDEN_DIMS=48, DELTA_KEY_HEADS=2,
  DELTA_VALUE_HEADS=4, DELTA_KEY_DIMS=8, DELTA_VALUE_DIMS=6,
)  # fmt: skip
MODELS |= {
  'states': Qwen3_5(**HYBRID, USE_REPEATED_LAYER=False),
  'states repeated': Qwen3_5(**HYBRID),
}
MODELS['linked'] = Gemma4(
  **SMALL | dict(NUM_LAYERS=4), NUM_DENSE_BLOCKS=4, NUM_KV_HEADS=2, DIMS_PER_HEAD=8,
  FULL_DIMS_PER_HEAD=12, HIDDEN_DIMS=48, SLIDING_WINDOW=6, ATTENTION_PATTERN=['sliding', 'full'],
  PER_LAYER_EMBEDDING_DIMS=32, NUM_KV_SHARED_LAYERS=2, USE_REPEATED_LAYER=False,
)  # fmt: skip
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13], [4], list(range(3, 40))]
SAMPLING = Sampling(
  1.0, top_k=50, top_p=0.9, repetition_penalty=1.3, min_p=0.01, presence_penalty=0.2,
  frequency_penalty=0.1,
)  # fmt: skip


@functools.cache
def made(name: str):
  """Returns a model and its parameters, which all tests share."""
  model = fdl.build(MODELS[name].build_task()).model
  params = meta.unbox(jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32)))['params']
  FORWARD[id(model)] = jax.jit(model.apply)
  return model, params


FORWARD: dict[int, Any] = {}  # the computation of logits without a cache, by the id of a model


def log_probs(model, params, ids):
  """Returns ln p of every next token without a cache, [T, V]; one program for all lengths."""
  padded = np.array([[*ids, *[0] * 64]])[:, :64]
  logits = FORWARD[id(model)]({'params': params}, padded)[0, : len(ids)]
  return np.asarray(jax.nn.log_softmax(logits))


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  'name',
  ['window']
  + [
    pytest.param(n, marks=pytest.mark.slow)
    for n in ('states', 'linked', 'gpt', 'llama', 'pipeline', 'repeated', 'states repeated', 'glam')
  ],
)
def test_the_cache_gives_what_recomputing_gives(name):
  """The tokens of every row are equal, with more prompts than rows, and in a stream."""
  model, params = made(name)
  engine = engine_of(model, params, 64, most_rows=2)
  rows = engine.continuations(PROMPTS, 16)
  for prompt, row in zip(PROMPTS, rows, strict=True):
    likeliest = log_probs(model, params, prompt + row[:-1]).argmax(-1)
    assert likeliest[len(prompt) - 1 :].tolist() == row
  assert list(engine.stream(PROMPTS[1], 16)) == rows[1]


@pytest.mark.slow
def test_log_probabilities_of_prompts_and_answers():
  """They are those of the model, whatever the sampling, and so are those of the likeliest."""
  model, params = made('llama')
  engine = engine_of(model, params, 64)
  asked = [Request(p, 6, SAMPLING, seed=3, top_log_probs=3, scored_from=0) for p in PROMPTS]
  for prompt, answer in zip(PROMPTS, engine.generate(asked), strict=True):
    expected = log_probs(model, params, prompt + answer.ids)
    first, *scores = answer.prompt_scores + answer.scores
    assert first is None
    whole = prompt + answer.ids
    assert len(scores) == len(whole) - 1
    for i, score in enumerate(scores):
      np.testing.assert_allclose(score.log_prob, expected[i, whole[i + 1]], atol=1e-5)
      assert [*score.top] == np.argsort(-expected[i], kind='stable')[:3].tolist()
      np.testing.assert_allclose([*score.top.values()], -np.sort(-expected[i])[:3], atol=1e-5)
    likely = expected.argmax(-1)[: len(prompt) - 1].tolist()
    assert [s.is_greedy for s in scores[: len(prompt) - 1]] == [
      a == b for a, b in zip(likely, prompt[1:], strict=True)
    ]


@pytest.mark.slow
def test_a_beginning_that_prompts_share_is_read_once():
  model, params = made('llama')
  engine = engine_of(model, params, 64, SAMPLING)
  long = list(range(3, 50))
  requests = [engine.request(p, 8, 1, i) for i, p in enumerate([long, long, [*long[:30], 1, 2]])]
  together = engine.generate(requests)
  assert [answer.shared for answer in together] == [0, 46, 30]
  other = engine_of(model, params, 64)
  alone = [other.generate([r])[0] for r in requests]
  assert [a.ids for a in together] == [a.ids for a in alone]
  engine.generate(requests[:1])
  (again,) = engine.generate([engine.request(long + together[0].ids[:4], 4)])
  assert again.shared == 50  # the answer before it, too
  engine.params = params  # what was read of other parameters is forgotten
  assert engine.generate(requests[:1])[0].shared == 0
  scored = Request(long, 0, scored_from=40)
  (answer,) = engine.generate([scored])
  assert answer.shared == 39  # the token before the first one to be scored is read
  assert len(answer.prompt_scores) == 7


def scores(model, params, prompt):
  """Returns ln p of the tokens of a prompt without a cache."""
  found = log_probs(model, params, prompt[:-1])
  return found[np.arange(len(prompt) - 1), prompt[1:]]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_row_that_lost_slots_is_shared_no_further():
  """A long answer, then short ones that make the cache smaller, then the long one goes on."""
  experiment = LLaMA(**LLAMA | SHALLOW | dict(MAX_SEQ_LEN=700))
  model = fdl.build(experiment.build_task()).model
  _, params = made('llama')
  engine = Engine(model, params, 700)
  long = np.random.default_rng(0).integers(3, 90, 600).tolist()
  (first,) = engine.generate([engine.request(long, 4)])
  engine.continuations([[7, 8, 9], [8, 9], [9]], 4)
  assert engine._pool.slots == 128
  longer = [*long, *first.ids, 5]
  (again,) = engine.generate([Request(longer, 2, scored_from=600)])
  assert again.shared <= 128
  padded = np.array([[*longer, *[0] * 95]])
  logits = jax.jit(model.apply)({'params': params}, padded)[0]
  expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(599, 604), longer[600:]]
  np.testing.assert_allclose([s.log_prob for s in again.prompt_scores], expected, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama', 'states', 'linked'])
def test_crowds_of_requests_with_options_and_beginnings_of_all_kinds(name):
  """Few rows, many prompts that begin alike, and options that only later ones need."""
  model, params = made(name)
  draw = np.random.default_rng(0)
  beginnings = [draw.integers(3, 90, n).tolist() for n in (20, 33, 18)]
  asked = []
  for i in range(40):
    prompt = beginnings[draw.integers(3)] + draw.integers(3, 90, draw.integers(1, 16)).tolist()
    if i % 7 == 3:
      prompt = prompt[-3:]
    more = {0: dict(bias={50: 100.0}), 1: dict(sampling=SAMPLING)}.get(i % 9, {})
    first = 1 if i % 3 else max(1, len(prompt) - 2)
    asked.append(Request(prompt, int(draw.integers(0, 9)), seed=i, scored_from=first, **more))
  engine = engine_of(model, params, 64, most_rows=4)
  alone = engine_of(model, params, 64, most_rows=1)
  shared = 0
  for round_ in range(2):
    for request, answer in zip(asked, engine.generate(asked), strict=True):
      found = [s.log_prob for s in answer.prompt_scores]
      expected = scores(model, params, request.prompt)[request.scored_from - 1 :]
      np.testing.assert_allclose(found, expected, atol=1e-5)
      if not round_:
        alone.params = params
        assert answer.ids == alone.generate([request])[0].ids
      if request.bias:
        assert set(answer.ids) <= {50}
      shared += answer.shared
  assert bool(shared) == (name != 'states')  # a state has seen all tokens of its row


@pytest.mark.slow
def test_a_cancelled_row_is_no_source():
  model, params = made('llama')
  engine = engine_of(model, params, 64, most_rows=2)
  long = list(range(3, 40))
  engine.generate([engine.request(long, 2)])
  job = engine.add(engine.request([*long, 5, 6], 4))
  engine._scheduler.admit(engine._queue, 1)
  engine.cancel(job)  # before its beginning was copied
  (answer,) = engine.generate([Request([*long, 5, 6, 7], 0, scored_from=1)])
  found = [s.log_prob for s in answer.prompt_scores]
  np.testing.assert_allclose(found, scores(model, params, [*long, 5, 6, 7]), atol=1e-5)


@pytest.mark.slow
def test_long_prompts_are_read_beside_short_ones_that_keep_coming():
  model, params = made('llama')
  engine = engine_of(model, params, 64, most_rows=2)
  jobs = [engine.add(engine.request([i], 1)) for i in (3, 4)]
  engine.step()
  long = engine.add(engine.request(list(range(3, 60)), 2))
  for i in range(20):
    jobs.append(engine.add(engine.request([i + 5, 3], 1)))
    engine.step()
    if long.answer is not None:
      break
  assert long.answer is not None


@pytest.mark.slow
def test_with_a_fixed_size_numbers_are_equal_to_the_last_bit():
  model, params = made('llama')
  requests = [Request(p, 9, SAMPLING, seed=5, sample=i) for i, p in enumerate(PROMPTS)]
  engine = engine_of(model, params, 64, most_rows=4, slots=64)
  together = engine.generate(requests)
  for request, answer in zip(requests, together, strict=True):
    assert engine.generate([request])[0] == answer
  assert engine.generate([*reversed(requests)]) == [*reversed(together)]


class Interpolated(Attention):
  """A user's attention, which turns queries and keys by other positions."""

  def __call__(self, x_BTD, positions_BT, segment_ids_BT=None):
    return super().__call__(x_BTD, positions_BT // 4, segment_ids_BT)


@pytest.mark.slow
def test_what_a_token_sees_does_not_depend_on_the_positions_of_a_layer():
  config = MODELS['llama'].build_task()
  for layer in selectors.select(config.model, Attention):
    fdl.update_callable(layer, Interpolated)
  model = fdl.build(config).model
  _, params = made('llama')
  (row, *_) = engine_of(model, params, 64).continuations(PROMPTS, 8)
  logits = jax.jit(model.apply)({'params': params}, np.array([[*PROMPTS[0], *row]]))[0]
  assert logits[len(PROMPTS[0]) - 1 : -1].argmax(-1).tolist() == row


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bfloat16_takes_the_likeliest_but_for_rounding():
  """Without a cache, each token's logit is the largest, or below it by 2 of its last bits."""
  model, params = made('bfloat16')
  rows = engine_of(model, params, 64).continuations(PROMPTS, 8)
  for prompt, row in zip(PROMPTS, rows, strict=True):
    assert len(row) == 8
    logits = model.apply({'params': params}, np.array([[*prompt, *row]]))[0, len(prompt) - 1 : -1]
    logits = np.asarray(logits, np.float32)
    chosen, largest = logits[np.arange(8), row], logits.max(-1)
    assert (largest - chosen <= 2 * 2.0**-7 * np.abs(largest)).all()


@pytest.mark.slow
def test_one_program_for_all_lengths():
  experiment = MODELS['llama']
  model, params = made('llama')
  engine = Engine(model, params, 64, mesh=experiment.mesh(jax.devices()[:1]), most_rows=2)
  for length, new in ((1, 3), (7, 20), (16, 32), (40, 17)):
    engine.continuations([list(range(n, n + length)) for n in (3, 4, 5)], new)
  assert engine._compiled.decode._cache_size() == 1
  # one prompt or several, of at most 16 or 64 tokens
  assert engine._compiled.read._cache_size() <= 6


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('sampling', [Sampling(temperature=0.7), SAMPLING])
def test_a_seed_fixes_a_row_in_any_batch(sampling):
  model, params = made('llama')
  engine = engine_of(model, params, 64, sampling)
  rows = engine.continuations(PROMPTS, 12, seed=3)
  assert rows == engine.continuations(PROMPTS, 12, seed=3)
  assert rows != engine.continuations(PROMPTS, 12, seed=4)
  assert rows[1:3] == engine.continuations(PROMPTS[1:3], 12, seed=3, samples=[1, 2])
  assert len({*map(tuple, engine.continuations(PROMPTS[:1] * 4, 12))}) == 4


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
  ('vocab', 'top_k', 'top_p', 'min_p'),
  [
    (50, 12, 0.7, 0.0),
    (50, 0, 1.0, 0.2),
    (3000, 0, 0.5, 0.0),
    (3000, 0, 0.999, 0.0),
    (3000, 2000, 0.99, 0.0),
    (3000, 0, 1.0, 0.0),
  ],
)
def test_the_filters_are_those_of_transformers(vocab, top_k, top_p, min_p):
  torch = pytest.importorskip('torch')
  from transformers.generation import logits_process as theirs

  scores = np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32) * 2
  full = lambda x, dtype: np.full(3, x, dtype)
  options = full(top_k, np.int32), full(top_p, np.float32), full(min_p, np.float32)
  ours = filtered(scores, *options)
  expected = torch.tensor(scores)
  for process in (
    *([theirs.TopKLogitsWarper(top_k)] if top_k else []),
    *([theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []),
    *([theirs.MinPLogitsWarper(min_p)] if min_p else []),
  ):
    expected = process(None, expected)
  np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)


@pytest.mark.slow
def test_penalties_ends_and_least_lengths_as_in_transformers(tmp_path):
  torch = pytest.importorskip('torch')
  from tests.parity.test_weights import loaded, run_import, their_model

  theirs = their_model('llama_gqa_tied')
  theirs.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  _, model, params = loaded(tmp_path / 'w')
  prompt = [5, 9, 11, 5]
  penalty = Sampling(repetition_penalty=1.5)
  plain = engine_of(model, params, 64, penalty).continuations([prompt], 20)[0]
  for eos, least in ((None, 0), (plain[6], 0), (plain[6], 9)):
    with torch.no_grad():
      out = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.5,
        eos_token_id=eos, pad_token_id=0, min_new_tokens=least,
      )[0, 4:].tolist()  # fmt: skip
    ends = [] if eos is None else [eos]
    request = Request(prompt, 20, penalty, min_tokens=least, ends=ends)
    (answer,) = engine_of(model, params, 64).generate([request])
    assert answer.ids == (out[: out.index(eos)] if eos in out else out)
    assert answer.finish == ('stop' if eos in out else 'length')


@pytest.mark.slow
def test_ids_without_a_token_are_never_drawn():
  model, params = made('llama')
  is_token = np.arange(params['embedding']['emb_var'].shape[0] - 9) % 7 == 3
  engine = Engine(model, params, 64, Sampling(temperature=9.0), is_token=is_token)
  drawn = {i for row in engine.continuations([[1]] * 4, 30) for i in row}
  assert len(drawn) > 1
  assert drawn <= set(np.flatnonzero(is_token).tolist())


class Rising:
  """A grammar: each token is larger than the one before, and 50 or more ends the text."""

  def __init__(self, tokens=()):
    self.tokens = [*tokens]

  def allowed(self):
    return np.arange(97) > (self.tokens[-1] if self.tokens else 10)

  def accept(self, token):
    self.tokens.append(token)

  may_end = True

  @property
  def is_complete(self):
    return self.tokens[-1] >= 50


class Failing(Rising):
  """A grammar that fails after some tokens, when it is asked or when it is told."""

  def __init__(self, method, after):
    super().__init__()
    self.method, self.after = method, after

  def _count(self, method):
    if method == self.method and len(self.tokens) >= self.after:
      raise RuntimeError('the grammar has failed')

  def allowed(self):
    self._count('allowed')
    return super().allowed()

  def accept(self, token):
    self._count('accept')
    super().accept(token)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(('method', 'after'), [('allowed', 0), ('allowed', 1), ('accept', 0)])
def test_a_request_that_fails_ends_alone(method, after):
  model, params = made('window')
  engine = engine_of(model, params, 64, most_rows=2)
  honest = [Request([5, 6, i], 9) for i in range(3)]
  alone = [answer.ids for answer in engine.generate(honest)]
  failing = engine.add(Request([5, 6], 20, grammar=Failing(method, after)))
  jobs = [engine.add(request) for request in honest]
  while engine.step(most=2):
    pass
  assert [job.answer.ids for job in jobs] == alone
  assert (str(failing.error), failing.answer.finish) == ('the grammar has failed', 'cancelled')
  assert engine.num_active == 0
  with pytest.raises(RuntimeError, match='has failed'):
    engine.generate([Request([5, 6], 20, grammar=Failing(method, after)), honest[0]])
  assert engine.generate(honest)[0].ids == alone[0]


@pytest.mark.slow
def test_grammars_and_biases_beside_other_requests():
  model, params = made('llama')
  engine = engine_of(model, params, 64)
  grammar = Rising()
  plain = Request([5, 6], 12)
  bias = {i: -100.0 for i in range(97) if i % 5}
  asked = [plain, Request([5, 6], 40, grammar=grammar), Request([7, 8], 12, bias=bias)]
  free, rising, fives = engine.generate(asked)
  assert rising.ids == sorted(set(rising.ids))
  assert rising.ids == grammar.tokens
  assert rising.ids[0] > 10
  assert rising.ids[-1] >= 50 > max(rising.ids[:-1], default=0)
  assert rising.finish == 'stop'
  assert not any(i % 5 for i in fives.ids)
  assert free.ids == engine_of(model, params, 64).generate([plain])[0].ids


@pytest.mark.slow
def test_texts_that_end_an_answer_span_tokens():
  """Pieces of a stream add up to the text, and never hold a part of what ends it."""
  tokenizer = open_tokenizer(packaged.VOCAB)
  experiment = LLaMA(**LLAMA | SHALLOW | dict(VOCAB_SIZE=8192))
  model = fdl.build(experiment.build_task()).model
  params = meta.unbox(jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32)))['params']
  engine = engine_of(model, params, 64, Sampling(1.0), tokenizer=tokenizer)
  (whole,) = engine.generate([engine.request([5, 6, 7], 40, seed=2)])
  assert whole.text == tokenizer.decode(whole.ids)
  middle = len(whole.text) // 2
  ending = whole.text[middle : middle + 9]
  request = Request([5, 6, 7], 40, Sampling(1.0), 2, stop=[ending, 'no such text'])
  job = engine.add(request)
  pieces = []
  while job.answer is None:
    engine.step(most=1)
    pieces += job.parts()
  assert job.answer.text == whole.text.split(ending)[0] == shown(pieces)
  assert job.answer.finish == 'stop'
  assert len(job.answer.ids) < len(whole.ids)
  assert job.answer.ids == whole.ids[: len(job.answer.ids)]


def test_an_answer_that_is_cancelled_makes_room():
  model, params = made('llama')
  engine = engine_of(model, params, 64, most_rows=1)
  first, second = engine.add(engine.request([1, 2], 60)), engine.add(engine.request([3], 5))
  engine.step(most=4)
  assert (engine.num_active, len(engine._queue)) == (1, 1)
  engine.cancel(first)
  assert first.answer.finish == 'cancelled'
  assert len(first.answer.ids) == 5
  while engine.step():
    pass
  assert second.answer.ids == engine_of(model, params, 64).continuations([[3]], 5)[0]


@pytest.mark.parametrize(
  ('prompt', 'new', 'match'),
  [
    ([], 1, 'a prompt is empty'),
    (list(range(64)), 1, 'leaves no room'),
    ([1], 0, 'must be at least 1'),
  ],
)
def test_prompts_that_cannot_be_continued(prompt, new, match):
  model, params = made('llama')
  with pytest.raises(UserError, match=match):
    Engine(model, params, 64).continuations([prompt], new)


@pytest.mark.parametrize(
  ('values', 'match'),
  [
    (dict(max_tokens=70), 'prompt 0 has 2 tokens and requests 70 new ones: the limit is 64'),
    (dict(max_tokens=4, stop=['x']), 'the engine has no tokenizer'),
    (dict(max_tokens=-1), 'max_tokens=-1 must be at least 0'),
    (dict(max_tokens=3, min_tokens=4), 'min_tokens=4 must be from 0 to max_tokens=3'),
    (dict(max_tokens=3, ends=range(17)), 'at most 16'),
    (dict(max_tokens=3, seed=-1), 'seed=-1 must be'),
    (dict(max_tokens=3, ends=[1 << 40]), 'not all token ids'),
    (dict(max_tokens=3, bias={97: 1.0}), 'the bias of prompt 0 has the id 97'),
  ],
)
def test_requests_that_cannot_be_answered(values, match):
  model, params = made('llama')
  with pytest.raises(UserError, match=match):
    Engine(model, params, 64).generate([Request([1, 2], **values)])


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama', 'gpt'])
def test_a_batch_gives_each_prompt_what_it_gets_alone(name):
  """For all lengths of neighbors, the number of tokens and the tokens are the same."""
  model, params = made(name)
  prompts = [[7], list(range(3, 66)), list(range(10, 40)), [5, 6], list(range(63))]
  engine = engine_of(model, params, 64)
  for most in (100, 20):
    rows = engine.continuations(prompts, most)
    assert [len(r) for r in rows] == [min(most, 64 - len(p)) for p in prompts]
    assert rows == [engine.continuations([p], most)[0] for p in prompts]
  sampled = engine_of(model, params, 64, Sampling(1.0, top_k=9))
  rows = sampled.continuations(prompts, 100, seed=5)
  alone = [sampled.continuations([p], 100, 5, samples=[i])[0] for i, p in enumerate(prompts)]
  assert rows == alone


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
  ('ids', 'match'),
  [
    ([1, 97], 'has the id 97 at position 1: the ids of the vocabulary are 0 to 96'),
    ([1, 2, -1], 'has the id -1 at position 2'),
    ([2**40], f'has the id {2**40} at position 0'),
    ([1.5], 'must be a list of token ids'),
    (['a'], 'must be a list of token ids'),
    ([[1]], 'must be a list of token ids'),
  ],
)
def test_ids_outside_the_vocabulary_are_refused(ids, match):
  model, params = made('llama')
  with pytest.raises(UserError, match=f'prompt 1 {match}'):
    Engine(model, params, 64).continuations([[1], ids], 3)
  scorer = Scorer(model, params, 64)
  with pytest.raises(UserError, match=f'continuation 1 {match}'):
    scorer([Continuation([1], [2]), Continuation(ids, [1])])


ON_MESHES = """
import fiddle as fdl, jax, numpy as np
from flax.linen import meta
from paxlite.experiments.gemma4 import Gemma4
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.mixtral import Mixtral_8x7B
from paxlite.experiments.qwen_hybrid import Qwen3_5
from paxlite.generation.engine import Engine
from paxlite.config.generation import Sampling
from paxlite.parallel import partitioning

small = dict(NUM_LAYERS=2, NUM_HEADS=4, MODEL_DIMS=32, VOCAB_SIZE=96, MAX_SEQ_LEN=64,
  FPROP_DTYPE='float32', NUM_KV_HEADS=2, HIDDEN_DIMS=48, USE_REPEATED_LAYER=False)
prompts = [[1, 2, 3], list(range(3, 40)), [4], list(range(3, 40)), [9] * 12]
for experiment, meshes in (
  (LLaMA(**small), [[1, 4, 2], [1, 1, 2], [1, 8, 1]]),
  (Mixtral_8x7B(**small, NUM_EXPERTS=4, USE_DROPLESS_MOE=True), [[1, 2, 2]]),
  (
    Qwen3_5(
      **small | dict(NUM_LAYERS=4), DIMS_PER_HEAD=8, DELTA_KEY_HEADS=2, DELTA_VALUE_HEADS=4,
      DELTA_KEY_DIMS=8, DELTA_VALUE_DIMS=6,
    ),
    [[1, 2, 2]],
  ),
  (
    Gemma4(
      **small | dict(NUM_LAYERS=4), NUM_DENSE_BLOCKS=4, DIMS_PER_HEAD=8, FULL_DIMS_PER_HEAD=12,
      SLIDING_WINDOW=6, ATTENTION_PATTERN=['sliding', 'full'], PER_LAYER_EMBEDDING_DIMS=32,
      NUM_KV_SHARED_LAYERS=2,
    ),
    [[1, 2, 2]],
  ),
):
  model = fdl.build(experiment.build_task()).model
  boxed = jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32))
  params = meta.unbox(boxed)['params']
  alone = Engine(model, params, 64, Sampling(0.8)).continuations(prompts, 9)
  for shape in meshes:
    e = experiment.replaced(ICI_MESH_SHAPE=shape, DCN_MESH_SHAPE=[1, 1, 1])
    mesh = e.mesh(jax.devices()[: np.prod(shape)])
    like = partitioning.sharded_shapes({'params': boxed['params']}, mesh, e.rules)['params']
    placed = jax.tree.map(lambda x, l: jax.device_put(x, l.sharding), params, like)
    engine = Engine(model, placed, 64, Sampling(0.8), mesh=mesh, rules=e.rules, most_rows=4)
    assert engine.continuations(prompts, 9) == alone, shape
    print('equal on', shape)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_meshes_give_the_same_tokens():
  command = [sys.executable, '-c', ON_MESHES]
  result = subprocess.run(
    command, cwd=runs.ROOT, env=runs.environment(8), capture_output=True, text=True
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.count('equal on') == 6
