"""Text with drafts is that without them, in fewer steps where drafts are right."""

import collections
import subprocess
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.experiments.lfm import LFM2
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.mixtral import Mixtral_8x7B
from paxlite.experiments.qwen_hybrid import Qwen3_5
from paxlite.generation.engine import Engine
from paxlite.generation.ngram_drafts import NgramDrafts, ngram_drafts
from paxlite.generation.request import Request
from paxlite.generation.scheduler import common
from tests.support import runs
from tests.support.engines import engine_of

V, NEW = 11, 20
SMALL = dict(
  NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, NUM_KV_HEADS=1, HIDDEN_DIMS=24, VOCAB_SIZE=V,
  MAX_SEQ_LEN=64, FPROP_DTYPE='float32', NUM_PREDICTION_MODULES=1, USE_REPEATED_LAYER=False,
)  # fmt: skip


MADE: dict[str, tuple] = {}  # models and parameters, which tests share


def model_and_params(cls=LLaMA, share=1.0, **values):
  """Returns a model whose next token is mostly a function of the token, as that of its module.

  Args:
    cls: The experiment.
    share: A factor of the matrices of its blocks.
    **values: Its attributes.
  """
  key = f'{cls} {share} {values}'
  if key in MADE:
    return MADE[key]
  model = fdl.build(cls(**SMALL | values).build_task()).model
  shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape) + (x.ndim == 1), x.dtype)
  params = jax.tree.map(draw, meta.unbox(shapes)['params'])
  scale = lambda x: x * share if x.ndim > 1 else x
  params['transformer'] = jax.tree.map(scale, params['transformer'])
  if 'predictions_0' in params:
    projection = params['predictions_0']['projection']
    projection['w'] = 0.1 * projection['w'] + jnp.stack([jnp.eye(16), jnp.zeros((16, 16))])
  return MADE.setdefault(key, (model, params))


def steps_of(model, params, prompt, text):
  """Returns how many steps the text takes, from what the module says of the whole text."""
  ids = np.asarray([prompt + text])

  def drafts(params):
    bound = model.bind({'params': params})
    (y,) = bound.predicted(bound.hidden(ids), ids)
    return bound.logits(y).argmax(-1)[0]

  draft_T = np.asarray(jax.jit(drafts)(params))  # of the token two places behind each one
  count, steps = 1, 0
  while count < len(text):
    latest = len(prompt) + count - 1  # the place of the latest token
    is_right = draft_T[latest - 1] == ids[0, latest + 1]
    count, steps = count + 1 + int(is_right), steps + 1
  return steps


@pytest.mark.slow
def test_text_and_steps():
  model, params = model_and_params()
  engine, drafting = engine_of(model, params, 64), engine_of(model, params, 64, drafts=True)
  tokens = steps = 0
  for seed, length in enumerate((1, 5, 8)):
    prompt = np.random.default_rng(seed).integers(0, V, length).tolist()
    text = engine.continuations([prompt], NEW)[0]
    before = drafting.num_steps
    assert drafting.continuations([prompt], NEW)[0] == text
    taken = drafting.num_steps - before
    assert taken == steps_of(model, params, prompt, text)
    tokens, steps = tokens + NEW - 1, steps + taken
  assert 0.5 * tokens < steps < 0.9 * tokens  # some drafts were right, and some were not


def ngrams(tokens, count):
  """Returns what came after the last three or two tokens of a text when they came before, or −1."""
  ends = [
    at for size in (3, 2) for at in range(len(tokens) - 1, size - 1, -1)
    if tokens[at - size : at] == tokens[-size:]
  ]  # fmt: skip
  return (tokens[ends[0] :] * count)[:count] if ends else [-1] * count


@pytest.mark.parametrize('seed', range(3))
def test_drafts_are_what_came_after_the_last_tokens_before(seed):
  rng = np.random.default_rng(seed)
  seen = rng.integers(0, 4, (50, 30)).astype(np.int32)
  known = rng.integers(1, 31, 50)
  found = np.asarray(ngram_drafts(jnp.asarray(seen), jnp.asarray(known), 3))
  for row, n, drafts in zip(seen.tolist(), known, found.tolist(), strict=True):
    assert drafts == ngrams(row[:n], 3)


@pytest.mark.slow
def test_a_model_without_a_module_takes_the_steps_that_ngrams_leave(monkeypatch):
  """Each of them computes one token where there are no n-grams."""
  widths, expected = collections.Counter(), collections.Counter()
  after = NgramDrafts._next_drafts

  def next_drafts(self, params, variables, rows, computed):
    width = computed.ids_BW.shape[1]
    jax.debug.callback(lambda: widths.update([width]))
    return after(self, params, variables, rows, computed)

  monkeypatch.setattr(NgramDrafts, '_next_drafts', next_drafts)
  model, params = model_and_params(NUM_PREDICTION_MODULES=0)
  engine, drafting = Engine(model, params, 64), Engine(model, params, 64, drafts=True)
  tokens = steps = 0
  for seed, length in enumerate((1, 5, 24)):
    prompt = np.random.default_rng(seed).integers(0, V, length).tolist()
    text = engine.continuations([prompt], NEW)[0]
    assert drafting.continuations([prompt], NEW)[0] == text
    count = 1
    while count < NEW:
      drafts, rest = ngrams(prompt + text[:count], 3), text[count:]
      expected.update([1 if drafts[0] < 0 else 4])
      count += 1 + common(drafts, rest[: len(rest) - 1])
      steps += 1
    tokens += NEW - 1
  jax.effects_barrier()
  assert widths == expected
  assert set(widths) == {1, 4}
  assert drafting.num_steps == steps
  assert steps < 0.8 * tokens


DELTA = dict(
  NUM_LAYERS=3, DIMS_PER_HEAD=8, DELTA_KEY_HEADS=2, DELTA_VALUE_HEADS=4, DELTA_KEY_DIMS=8,
  DELTA_VALUE_DIMS=6, ATTENTION_PATTERN=['gated_delta', 'full'],
)  # fmt: skip
MODELS = {
  'keys': (LLaMA, dict(share=1.0)),
  'repeated window': (
    LLaMA, dict(USE_REPEATED_LAYER=True, NUM_LAYERS=2, SLIDING_WINDOW=6, share=0.3),
  ),
  'experts': (Mixtral_8x7B, dict(NUM_EXPERTS=4, USE_DROPLESS_MOE=True, share=0.5)),
  'states': (Qwen3_5, DELTA | dict(share=0.5)),
  'n-grams': (LLaMA, dict(NUM_PREDICTION_MODULES=0)),
  'n-grams states': (Qwen3_5, DELTA | dict(share=0.5, NUM_PREDICTION_MODULES=0)),
  'states repeated': (
    Qwen3_5, DELTA | dict(NUM_LAYERS=4, USE_REPEATED_LAYER=True, share=0.5),
  ),
  'convolutions': (
    LFM2, dict(NUM_LAYERS=2, ATTENTION_PATTERN=['short_convolution', 'full'], share=0.5),
  ),
}  # fmt: skip


class Letters:
  """A tokenizer: a letter for each id."""

  def decode(self, ids):
    return ''.join(chr(97 + i) for i in ids)

  decode_marked = decode


class Rising:
  """A grammar: no token is smaller than the one before, and the largest one ends the text."""

  def __init__(self):
    self.tokens = []

  def allowed(self):
    return np.arange(V) >= (self.tokens[-1] if self.tokens else 3)

  def accept(self, token):
    self.tokens.append(token)

  may_end = True

  @property
  def is_complete(self):
    return self.tokens[-1] == V - 1


def requests(rng, count: int, only_greedy: bool) -> list[Request]:
  """Returns requests of all kinds: lengths, ends, stop texts, random numbers, penalties …"""
  beginnings = [rng.integers(0, V, n).tolist() for n in (20, 33)]
  found = []
  for i in range(count):
    prompt = rng.integers(0, V, rng.integers(1, 9)).tolist()
    if i % 3 == 0:
      prompt = beginnings[rng.integers(2)] + prompt
    kinds = {
      0: dict(ends=[int(rng.integers(V))]),
      1: dict(stop=[''.join(chr(97 + x) for x in rng.integers(0, V, 2))]),
      2: dict(min_tokens=4, ends=[int(x) for x in rng.integers(0, V, 3)]),
      3: dict(sampling=Sampling(0.7, top_k=4, top_p=0.9)),
      4: dict(sampling=Sampling(0.0, repetition_penalty=1.3, presence_penalty=0.3)),
      5: dict(bias={3: 2.0, 4: -2.0}, top_log_probs=3),
      6: dict(sampling=Sampling(1.0, frequency_penalty=0.5)),
      7: dict(scored_from=1),
    }
    more = kinds.get(int(rng.integers(3 if only_greedy else 12)), {})
    most = int(rng.integers(more.get('min_tokens', 0), 24))
    found.append(Request(prompt, most, **dict(seed=i) | more))
  return found


def assert_same(found, wanted) -> None:
  for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
    assert (one.ids, one.text, one.finish, one.end) == (
      other.ids, other.text, other.finish, other.end,
    ), i  # fmt: skip
    for scores in ('scores', 'prompt_scores'):
      pairs = zip(getattr(one, scores), getattr(other, scores), strict=True)
      for a, b in ((a, b) for a, b in pairs if b is not None):
        assert a.log_prob == pytest.approx(b.log_prob, abs=1e-4)
        assert a.top.keys() == b.top.keys()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [name for name in MODELS if 'states' not in name or 'repeated' in name]
)
def test_rows_that_come_and_go_have_the_same_tokens(name):
  """Few rows, many requests of all kinds, which accept different numbers of drafts."""
  cls, values = MODELS[name]
  model, params = model_and_params(cls, **values)
  # a fixed size makes few programs
  slots = None if name in ('keys', 'n-grams') else 64
  plain, drafting = (
    engine_of(model, params, 64, tokenizer=Letters(), most_rows=4, slots=slots, drafts=d)
    for d in (False, True)
  )
  for seed, only_greedy in ((0, True), (1, False)):
    asked = requests(np.random.default_rng(seed), 24, only_greedy)
    found = drafting.generate(asked)
    assert_same(found, plain.generate(asked))
  assert drafting.num_tokens == plain.num_tokens
  assert drafting.num_steps < 0.95 * plain.num_steps
  assert any(answer.shared for answer in found) == (slots is None)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', ['keys', 'states', 'n-grams', 'n-grams states'])
def test_steps_one_by_one_and_requests_that_are_cancelled(name):
  """A row that others follow is ended from outside; rows begin while others are written."""
  cls, values = MODELS[name]
  model, params = model_and_params(cls, **values)
  plain, drafting = (engine_of(model, params, 64, most_rows=2, drafts=d) for d in (False, True))
  prompts = [np.random.default_rng(i).integers(0, V, 3 + 5 * i).tolist() for i in range(5)]
  texts = plain.continuations(prompts, 18)
  assert list(drafting.stream(prompts[0], 18)) == texts[0]
  jobs = [drafting.add(drafting.request(p, 18)) for p in prompts]
  drafting.step(most=3)
  drafting.cancel(jobs[0])
  drafting.step(most=1)
  jobs.append(drafting.add(drafting.request(prompts[0], 18)))
  while drafting.step(most=2):
    pass
  assert [job.answer.ids for job in jobs[1:]] == [*texts[1:], texts[0]]
  begun = jobs[0].answer.ids
  assert begun == texts[0][: len(begun)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_grammar_and_what_is_written_beside_it():
  """What a grammar allows after a draft is not known, so no draft is taken while there is one."""
  model, params = model_and_params()
  asked = lambda: [
    Request([1, 2, 3], 12, grammar=Rising()), Request([4, 5], 20), Request([6], 9, Sampling(1.0)),
  ]  # fmt: skip
  plain, drafting = (engine_of(model, params, 64, drafts=d) for d in (False, True))
  assert_same(drafting.generate(asked()), plain.generate(asked()))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_fixed_number_of_slots_and_a_text_to_the_last_position():
  model, params = model_and_params()
  for slots, longest in ((64, 64), (None, 24)):
    plain, drafting = (
      Engine(model, params, longest, slots=slots, most_rows=2, drafts=d) for d in (False, True)
    )
    prompts = [[1, 2, 3], list(range(10)), [5]]
    found = drafting.continuations(prompts, 64)
    assert found == plain.continuations(prompts, 64)
    assert [len(p) + len(ids) for p, ids in zip(prompts, found, strict=True)] == [longest] * 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_rows_draw_does_not_depend_on_drafts():
  """The same seeds give the same tokens, so that their distribution is the model's."""
  model, params = model_and_params()
  sampling = Sampling(1.0)
  plain, drafting = (
    engine_of(model, params, 64, sampling, most_rows=2, drafts=d) for d in (False, True)
  )
  prompts = [[1, 2, 3]] * 40
  found = drafting.continuations(prompts, 16)
  assert found == plain.continuations(prompts, 16)
  assert len({tuple(ids) for ids in found}) > 30
  assert drafting.num_steps < plain.num_steps


@pytest.mark.slow
def test_ends_and_room():
  """Two engines, of which the second is compiled once."""
  model, params = model_and_params()
  engine = engine_of(model, params, 64, drafts=True)
  (text,) = engine.continuations([[3, 4, 5]], NEW)
  end = text[7]
  (found,) = engine.generate([Request([3, 4, 5], NEW, ends=[end])])
  assert found.ids == text[: text.index(end)]
  assert found.end == end
  engine.max_length = 10
  assert engine.continuations([[3, 4, 5]], NEW)[0] == text[:7]
  with pytest.raises(UserError, match='leaves no room'):
    engine.continuations([[3, 4, 5] * 4], NEW)
  is_token = np.arange(V - 1) != end
  other = Engine(model, params, 64, is_token=is_token, drafts=True)
  assert not {end, V - 1} & set(other.continuations([[3, 4, 5]], NEW)[0])


ON_MESHES = """
import jax, numpy as np
from flax.linen import meta
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.qwen_hybrid import Qwen3_5
from paxlite.generation.engine import Engine
from paxlite.parallel import partitioning
from tests.unit.generation import test_speculative as t

prompts = [[1, 2, 3], list(range(10)) * 3, [4], list(range(10)) * 3, [9] * 12]
for name in ('keys', 'states', 'n-grams'):
  cls, values = t.MODELS[name]
  model, params = t.model_and_params(cls, **values)
  experiment = cls(**t.SMALL | {k: v for k, v in values.items() if k != 'share'})
  boxed = jax.eval_shape(model.init, jax.random.key(1), np.zeros((1, 1), np.int32))
  alone = Engine(model, params, 64).continuations(prompts, 12)
  for shape in ([1, 4, 1], [1, 2, 2]):
    e = experiment.replaced(ICI_MESH_SHAPE=shape, DCN_MESH_SHAPE=[1, 1, 1])
    mesh = e.mesh(jax.devices()[: np.prod(shape)])
    like = partitioning.sharded_shapes({'params': boxed['params']}, mesh, e.rules)['params']
    placed = jax.tree.map(lambda x, l: jax.device_put(x, l.sharding), params, like)
    engine = Engine(model, placed, 64, mesh=mesh, rules=e.rules, most_rows=4, drafts=True)
    assert engine.continuations(prompts, 12) == alone, shape
    print('equal on', shape)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_meshes_give_the_same_tokens():
  result = subprocess.run(
    [sys.executable, '-c', ON_MESHES],
    cwd=runs.ROOT, env=runs.environment(8), capture_output=True, text=True,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  assert result.stdout.count('equal on') == 6
