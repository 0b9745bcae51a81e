"""Embeddings of runs of tokens: their rows, the borders of segments, and the cache."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.ngram_embeddings import NgramEmbeddings
from paxlite.generation.engine import Engine
from paxlite.layers.ngram_embedding import hashed

V, T, ROWS = 61, 16, 101
SMALL = dict(
  NUM_LAYERS=2, MODEL_DIMS=32, NUM_HEADS=4, NUM_KV_HEADS=2, HIDDEN_DIMS=48, VOCAB_SIZE=V,
  MAX_SEQ_LEN=64, FPROP_DTYPE='float32', USE_REPEATED_LAYER=False, NGRAM_ROWS=ROWS,
  NGRAM_LENGTHS=[2, 3],
)  # fmt: skip


class Runs(NgramEmbeddings, LLaMA):
  pass


@pytest.fixture(scope='module')
def made():
  model = fdl.build(Runs(**SMALL).build_task()).model
  params = meta.unbox(jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32)))['params']
  assert not any(np.any(x) for x in jax.tree.leaves(params['ngrams']))  # begins without them
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)
  return model, params | {'ngrams': jax.tree.map(draw, params['ngrams'])}


def embedded(made, ids, positions):
  model, params = made
  args = np.array([ids]), np.array([positions])
  return np.asarray(model.apply({'params': params}, *args, method='embedded'))[0]


def test_a_token_gets_the_rows_of_its_runs_within_its_segment(made):
  ids = np.random.default_rng(0).integers(0, V, T).tolist()
  found = embedded(made, ids, [*range(5), *range(T - 5)])
  tables = {n: np.asarray(made[1]['ngrams'][f'of_{n}']['emb_var']) for n in (2, 3)}
  tokens = np.asarray(made[1]['embedding']['emb_var'])
  for t, x in enumerate(found):
    segment = [-1, -1, *(ids[: t + 1] if t < 5 else ids[5 : t + 1])]
    rows = {n: int(hashed([jnp.int32(i) for i in segment[::-1][:n]], ROWS)) for n in tables}
    expected = tokens[ids[t]] + sum(table[rows[n]] for n, table in tables.items())
    np.testing.assert_allclose(x, expected, atol=1e-6)


@pytest.mark.parametrize('rows', [4096, 5000])
@pytest.mark.parametrize('length', [2, 3, 4])
def test_runs_are_spread_over_the_rows(rows, length):
  """As many runs as rows leave 1/e of the rows empty where rows are drawn at random."""
  side = round(rows ** (1 / length)) + 1
  grid = np.indices([side] * length).reshape(length, -1)[:, :rows]
  found = np.asarray(hashed([jnp.asarray(x) for x in grid], rows))
  assert 0 <= found.min() <= found.max() < rows
  assert len({*found.tolist()}) / len(found) == pytest.approx(1 - np.exp(-1), abs=0.03)


@pytest.mark.slow
def test_a_cache_gives_what_recomputing_gives(made):
  """With more prompts than rows, prompts in parts, and drafts that are dropped."""
  model, params = made
  prompts = [[1, 2, 3], [5, 6, 5, 6, 5, 6, 5], [4], list(range(3, 40))]
  plain, drafting = (Engine(model, params, 64, most_rows=2, drafts=d) for d in (False, True))
  found = plain.continuations(prompts, 16)
  assert drafting.continuations(prompts, 16) == found
  apply = jax.jit(model.apply)
  for prompt, text in zip(prompts, found, strict=True):
    ids = prompt + text[:-1]
    logits = apply({'params': params}, np.array([[*ids, *[0] * 64]])[:, :64])[0]
    assert logits.argmax(-1)[len(prompt) - 1 : len(ids)].tolist() == text


@pytest.mark.parametrize('lengths', [[], [1], [2, 5], [3, 3]])
def test_lengths_that_are_none(lengths):
  with pytest.raises(UserError, match=r'NGRAM_LENGTHS=\[.*\]: choose different numbers from 2 to'):
    Runs(**SMALL | dict(NGRAM_LENGTHS=lengths)).validate()
