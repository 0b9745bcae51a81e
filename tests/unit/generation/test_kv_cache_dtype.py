"""A cache of 8 bits: what numpy would store, in every engine, and how far logits move."""

import subprocess
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import meta

from paxlite.config.attributes import parse
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.eval.decoding import decode_file
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.lfm import LFM2
from paxlite.experiments.llama import LLaMA
from paxlite.generation.engine import Engine
from paxlite.generation.inference import TextModel
from paxlite.generation.request import Request
from paxlite.layers.attention import attention, cache_encoding
from tests.support import runs
from tests.unit.generation import test_engine, test_speculative

INT8, FP8 = cache_encoding.DTYPES
BEGINNING = list(range(3, 40))
PROMPTS = [[1, 2, 3], [*BEGINNING, 7], [4], [*BEGINNING, 8, 9], [*BEGINNING, 7, 5], [9] * 12]


def stored(x, dtype: str):
  """Returns what a cache keeps of vectors, by numpy alone."""
  most = {INT8: 127, FP8: 448}[dtype]
  x = np.asarray(x, np.float32)
  scale = np.abs(x).max(-1, keepdims=True) / np.float32(most)
  scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
  scale[scale == 0] = 1
  numbers = np.clip(x / scale, -most, most)
  return scale * (np.rint(numbers) if dtype == INT8 else numbers.astype(dtype).astype(np.float32))


@pytest.mark.parametrize('dtype', [INT8, FP8])
def test_what_is_stored_of_a_vector(dtype):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 40, 2, 16)) * 10.0 ** rng.integers(-30, 30, (3, 40, 2, 1))
  x[0, 0], x[1, 1, 1] = 0, 1e-44
  x = x.astype(np.float32)
  with cache_encoding.activate(dtype):
    kept = jax.jit(lambda x: cache_encoding.encoded(x))(x)  # traced here
    of_nan = cache_encoding.encoded(jnp.asarray([1.0, np.nan]))
  assert (kept.shape, str(kept.dtype), kept.scale.dtype) == (x.shape, dtype, jnp.bfloat16)
  found = np.asarray(kept.decoded(jnp.float32))
  np.testing.assert_allclose(found, stored(x, dtype), rtol=1e-6, atol=1e-37)
  largest = np.abs(x).max(-1, keepdims=True)
  allowed = largest / 127 * 0.51 if dtype == INT8 else np.maximum(np.abs(x) / 16, largest / 2**17)
  assert (np.abs(found - x) <= allowed * 1.01 + 1e-37).all()
  assert np.isnan(np.asarray(of_nan.decoded(jnp.float32))).all()
  assert cache_encoding.encoded(x) is x  # no dtype is active any more


def answers(engine: Engine, prompts=PROMPTS):
  of = lambda first: [Request(p, 9, scored_from=first, top_log_probs=2) for p in prompts]
  found = [*engine.generate(of(0)), *engine.generate(of(None)[::-1])]  # what rows hold is shared
  scores = [s for a in found for s in [*a.prompt_scores[1:], *a.scores]]
  return [a.ids for a in found], np.array([s.log_prob for s in scores])


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize(
  ('name', 'dtype', 'options'),
  [
    ('window', INT8, dict(most_rows=2)),
    ('repeated', FP8, dict(most_rows=4, slots=64)),
    ('linked', INT8, dict(most_rows=3)),
    ('module', INT8, dict(most_rows=2, drafts=True)),
    ('llama', FP8, dict(most_rows=4, drafts=True)),
    ('states', INT8, dict(most_rows=2)),
    ('glam', INT8, dict(most_rows=8, steady=True)),
    ('gpt', FP8, dict(most_rows=1)),
  ],
  ids=str,
)
def test_an_engine_stores_what_numpy_stores(monkeypatch, name, dtype, options):
  """Rows end, move, share beginnings and are resized; drafts are checked."""
  prompts = PROMPTS
  if name == 'module':
    model, params = test_speculative.model_and_params(share=0.5)
    prompts = [[id % 11 for id in prompt] for prompt in PROMPTS]
  else:
    model, params = test_engine.made(name)
  ids, found = answers(Engine(model, params, 64, kv_cache_dtype=dtype, **options), prompts)

  def by_numpy(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    one = lambda x: stored(x, dtype).astype(x.dtype)
    return jax.pure_callback(one, like, x, vmap_method='sequential')

  monkeypatch.setattr(attention, 'encoded', by_numpy)
  expected_ids, expected = answers(Engine(model, params, 64, **options), prompts)
  assert ids == expected_ids
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(('dtype', 'most'), [(INT8, 0.01), (FP8, 0.045)])
def test_how_far_logits_move(dtype, most):
  """Root mean squares, of a model in which attention makes most of the logits."""
  model, params = test_speculative.model_and_params(NUM_LAYERS=2, NUM_PREDICTION_MODULES=0)
  ids = np.random.default_rng(0).integers(0, 11, (4, 64))
  logits = lambda: np.asarray(model.apply({'params': params}, ids, mutable=['cache'])[0])
  plain = logits()
  with cache_encoding.activate(dtype):
    moved = logits() - plain
  share = np.sqrt((moved**2).mean() / plain.var(-1).mean())
  print(dtype, 'logits move by', share)
  assert 1e-4 < share < most


def test_bytes_of_a_cache():
  model, params = test_engine.made('bfloat16')
  size = lambda dtype: Engine(model, params, 64, kv_cache_dtype=dtype).cache_bytes(8, 128)
  H = 32 // 4
  assert size(INT8) == size(FP8) == size(None) * (H + 2) // (2 * H)


@pytest.mark.parametrize(
  ('cls', 'values', 'has'),
  [
    (
      DeepSeekV3,
      dict(NUM_DENSE_BLOCKS=1, LATENT_DIMS=8, QUERY_LATENT_DIMS=8, DIMS_PER_HEAD=4,
           ROTARY_DIMS_PER_HEAD=4, VALUE_DIMS_PER_HEAD=4),
      'keys, latents',
    ),
    (LFM2, dict(ATTENTION_PATTERN=['short_convolution'], NUM_KV_HEADS=1), 'no keys'),
  ],
)  # fmt: skip
def test_what_is_not_encoded_is_refused(cls, values, has, tmp_path):
  """Before anything is written."""
  e = cls(KV_CACHE_DTYPE=INT8, **test_engine.SMALL | dict(NUM_LAYERS=1, HIDDEN_DIMS=48) | values)
  model = fdl.build(e.build_task()).model
  params = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32)))
  text_model = TextModel(e, model, params['params'], None, open_tokenizer(packaged.VOCAB), 64)
  with pytest.raises(UserError, match=rf'KV_CACHE_DTYPE=int8 .* caches {has}: leave [^\n]*$'):
    decode_file(text_model, [], tmp_path / 'answers.jsonl')
  assert not [*tmp_path.iterdir()]


def test_other_dtypes_are_refused():
  model, params = test_engine.made('window')
  with pytest.raises(UserError, match="kv_cache_dtype='fp4' is unknown; use int8 or float8_e4m3fn"):
    Engine(model, params, 64, kv_cache_dtype='fp4')
  assert parse(LLaMA, 'KV_CACHE_DTYPE', 'int8') == INT8
  with pytest.raises(UserError, match=r"KV_CACHE_DTYPE must be one of 'int8', .*'fp8'[^\n]*$"):
    parse(LLaMA, 'KV_CACHE_DTYPE', 'fp8')


ON_MESHES = """
import fiddle as fdl, jax, numpy as np
from flax.linen import meta
from paxlite.experiments.llama import LLaMA
from paxlite.generation.cache import Pages
from paxlite.generation.engine import Engine
from paxlite.parallel import partitioning
from tests.unit.generation.test_kv_cache_dtype import PROMPTS

for dtype, repeated in (('int8', False), ('float8_e4m3fn', True)):
  experiment = LLaMA(NUM_LAYERS=2, NUM_HEADS=4, MODEL_DIMS=32, VOCAB_SIZE=97, MAX_SEQ_LEN=64,
    FPROP_DTYPE='float32', NUM_KV_HEADS=2, HIDDEN_DIMS=48, USE_REPEATED_LAYER=repeated)
  model = fdl.build(experiment.build_task()).model
  boxed = jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32))
  params = meta.unbox(boxed)['params']
  alone = Engine(model, params, 64, kv_cache_dtype=dtype).continuations(PROMPTS, 9)
  for shape in ([1, 4, 2], [1, 1, 2]):
    e = experiment.replaced(ICI_MESH_SHAPE=shape, DCN_MESH_SHAPE=[1, 1, 1])
    mesh = e.mesh(jax.devices()[: np.prod(shape)])
    like = partitioning.sharded_shapes({'params': boxed['params']}, mesh, e.rules)['params']
    placed = jax.tree.map(lambda x, l: jax.device_put(x, l.sharding), params, like)
    engine = Engine(
      model, placed, 64, mesh=mesh, rules=e.rules, most_rows=4, kv_cache_dtype=dtype
    )
    assert engine.continuations(PROMPTS, 9) == alone, shape
    cache = engine._pool.state.cache
    split = {path[-1]: x.size // x.addressable_shards[0].data.size for path, x in cache.items()}
    assert split == dict.fromkeys(['key', 'key_scale', 'value', 'value_scale'], np.prod(shape))
    if shape == [1, 1, 2]:
      engine = Engine(
        model, placed, 64, mesh=mesh, rules=e.rules, most_rows=4, kv_cache_dtype=dtype,
        pages=Pages(9, 8),
      )
      assert engine.continuations(PROMPTS, 9) == alone, 'pages'
      assert engine._scheduler.pages.num_free < 9
    print('equal on', shape)
"""


@pytest.mark.slow
def test_meshes_give_the_same_tokens_and_split_scales_as_heads():
  result = subprocess.run(
    [sys.executable, '-c', ON_MESHES],
    cwd=runs.ROOT, env=runs.environment(8), capture_output=True, text=True,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  assert result.stdout.count('equal on') == 4
