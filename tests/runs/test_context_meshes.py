"""Whole models whose rows are split over devices have the loss and gradients of one device."""

import json
import types

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.context_parallelism import context_attention, context_choice
from paxlite.core.errors import UserError
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.llama import LLaMA
from paxlite.parallel import partitioning
from tests.support import runs

CASES = [
  ['llama/ring2', 'pattern/ring4', 'gpt/ring8'],
  ['llama/heads2', 'gpt/heads4', 'window/ring2'],
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('cases', CASES, ids=lambda c: c[0])
def test_split_rows_change_nothing_but_rounding(cases):
  done = runs.module('tests.support.context_meshes', *cases, devices=8)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert [r['case'] for r in results] == cases
  for r in results:
    assert r['loss'] < 1e-5, r
    assert r['gradient'] < 1e-5, r
    assert ('collective-permute context' in r['collectives']) == ('ring' in r['case']), r
    assert r['exchanges heads'] == ('heads' in r['case']), r


GPU = types.SimpleNamespace(platform='cuda', compute_capability='9.0')


def split(cls=LLaMA, size=8, **values):
  axes = ['replica', 'data', 'mdl', 'context']
  mesh = dict(MESH_AXES=axes, ICI_MESH_SHAPE=[1, 1, 1, size], DCN_MESH_SHAPE=[1, 1, 1, 1])
  return cls(**mesh | dict(PERCORE_BATCH_SIZE=1 / size, NUM_HEADS=32, MODEL_DIMS=1024) | values)


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    (dict(CONTEXT_ATTENTION='ring', DROPOUT_PROB=0.1), 'neither dropout.*=gather'),
    (dict(CONTEXT_ATTENTION='ring', cls=GLaM126M64E), 'nor a relative bias.*=gather'),
    (dict(CONTEXT_ATTENTION='ring', MAX_SEQ_LEN=4104), 'MAX_SEQ_LEN that is divisible by 2 × 8'),
    (dict(CONTEXT_ATTENTION='heads', NUM_KV_HEADS=4), 'NUM_KV_HEADS=4 .*=ring'),
  ],
)
def test_what_cannot_be(values, message):
  with pytest.raises(UserError, match=message):
    split(**values).validate()


@pytest.mark.parametrize(
  ('values', 'way'),
  [
    (dict(MAX_SEQ_LEN=256), 'gather'),
    (dict(MAX_SEQ_LEN=131072, NUM_KV_HEADS=8), 'ring'),
    (dict(MAX_SEQ_LEN=8192, NUM_KV_HEADS=8, PACKED_INPUT=False), 'heads'),
    (dict(MAX_SEQ_LEN=8192, NUM_KV_HEADS=4), 'ring'),  # 8 does not divide 4 heads
    (dict(MAX_SEQ_LEN=131072, NUM_KV_HEADS=8, DROPOUT_PROB=0.1), 'gather'),
    (dict(MAX_SEQ_LEN=131072, NUM_KV_HEADS=8, MAX_SEGMENTS_PER_SEQ=64), 'heads'),
  ],
)
def test_the_choice_is_made_from_shapes_and_stated(values, way):
  (choice,) = split(**values).attention_choices(GPU)
  assert f'over context 8: {way}.' in choice


def test_each_kind_of_attention_has_its_choice():
  e = split(MAX_SEQ_LEN=131072, SLIDING_WINDOW=4096, ATTENTION_PATTERN=['sliding', 'full'])
  full, sliding = e.attention_choices(GPU)
  assert full.startswith('Attention to all tokens, over context 8: ring.')
  assert sliding.startswith('Attention within 4,096 tokens, over context 8: ring.')


class Asked(Exception):
  pass


@pytest.mark.parametrize(
  'values',
  [
    dict(NUM_KV_HEADS=8),
    dict(NUM_KV_HEADS=8, MAX_SEGMENTS_PER_SEQ=64),
    dict(NUM_KV_HEADS=8, MAX_SEGMENTS_PER_SEQ=2048),
    dict(NUM_KV_HEADS=8, PACKED_INPUT=False),
    dict(NUM_KV_HEADS=8, PACKED_INPUT=False, USE_ATTENTION_SINKS=True),
    dict(NUM_KV_HEADS=8, MAX_SEGMENTS_PER_SEQ=64, USE_ATTENTION_SINKS=True),
    dict(NUM_KV_HEADS=8, MAX_SEGMENTS_PER_SEQ=64, SLIDING_WINDOW=262_144),
    dict(NUM_KV_HEADS=8, MAX_SEGMENTS_PER_SEQ=64, SLIDING_WINDOW=4096),
    dict(NUM_KV_HEADS=4),
    dict(NUM_KV_HEADS=8, MAX_SEQ_LEN=512),
  ],
)
def test_the_program_has_the_shapes_of_the_stated_choice(monkeypatch, values):
  e = split(**dict(MAX_SEQ_LEN=131_072, FPROP_DTYPE='bfloat16') | values)
  (window,) = e.windows
  stated = context_choice.shapes_of(e.attention_case(window, 'gpu', 9.0))

  def stop(shapes):
    raise Asked(shapes)

  monkeypatch.setattr(context_attention, 'estimates', stop)
  mesh = types.SimpleNamespace(devices=np.array([GPU]), shape=e.mesh_sizes)
  monkeypatch.setattr(partitioning, 'active_mesh', lambda: (mesh, e.rules))
  attention = fdl.build(e.dot_product_attention())()
  array = lambda heads: jax.ShapeDtypeStruct(
    (e.batch_size, e.MAX_SEQ_LEN, heads, e.DIMS_PER_HEAD), jnp.bfloat16
  )
  ids = jax.ShapeDtypeStruct((e.batch_size, e.MAX_SEQ_LEN), jnp.int32) if e.packed else None
  q, kv = array(e.NUM_HEADS), array(e.NUM_KV_HEADS)
  with pytest.raises(Asked) as found:
    jax.eval_shape(lambda *args: attention.init(jax.random.key(0), *args), q, kv, kv, ids)
  assert found.value.args[0] == stated
