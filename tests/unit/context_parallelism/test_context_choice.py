"""The choice of the way to compute attention over context, with bytes that are counted by hand."""

import dataclasses
import types

import pytest

from paxlite.context_parallelism.context_choice import Shapes, estimates, fastest
from paxlite.experiments.registry import find

# one row of LLaMA 3 8B on 8 devices: 32 heads of 128 numbers, 8 of keys
ROW = Shapes(rows=1, length=131_072, heads=32, kv_heads=8, width=128, size=8)
HEAD = 131_072 // 8 * 128 * 2  # bytes of one head of a device's tokens


def test_bytes_that_a_device_sends():
  found = estimates(ROW)
  assert found['gather'].sent == 7 * 2 * 8 * HEAD
  assert found['ring'].sent == (32 + 8) * HEAD + 7 * 2 * 8 * HEAD
  assert found['heads'].sent == 2 * (32 + 8) * HEAD * 7 / 8
  window = dataclasses.replace(ROW, window=4096)
  assert estimates(window)['ring'].sent == pytest.approx(2 * 8 * HEAD / 4, rel=1e-3)


@pytest.mark.parametrize('parts', [1, 2])
def test_bytes_are_those_of_the_rows_that_a_device_computes_at_a_time(parts):
  experiment = find('LLaMA3_8B')().replaced(
    MESH_AXES=['replica', 'data', 'mdl', 'context'], ICI_MESH_SHAPE=[1, 4, 1, 2],
    DCN_MESH_SHAPE=[1, 1, 1, 1], PERCORE_BATCH_SIZE=2, MAX_SEQ_LEN=8192, NUM_MICROBATCHES=parts,
  )  # fmt: skip
  rows = 16 // 4 // parts
  sent = rows * 2 * 8 * 4096 * 128 * 2  # the keys and values of the other device's tokens
  (choice,) = experiment.attention_choices(types.SimpleNamespace(platform='gpu'))
  assert f' ms and {sent / 1e6:.0f} MB sent with ' in choice


def test_bytes_of_scores_and_masks():
  found = estimates(ROW)
  assert found['gather'].held == 4 * 32 * 131_072**2 / 8
  assert found['ring'].held == found['heads'].held == 0
  masked = estimates(dataclasses.replace(ROW, masked_by_array=True))
  assert masked['heads'].held == 2 * 131_072**2
  assert masked['ring'].held == 2 * 2 * 8192**2
  bounded = estimates(dataclasses.replace(ROW, masked_by_array=True, max_segments=64))
  assert bounded['heads'] == dataclasses.replace(found['heads'], held=4 * 64 * 131_072 * 4)
  assert bounded['ring'] == masked['ring']


@pytest.mark.parametrize(
  ('changes', 'ways'),
  [
    (dict(), {'gather', 'ring', 'heads'}),
    (dict(kv_heads=4), {'gather', 'ring'}),
    (dict(heads=12), {'gather', 'ring'}),
    (dict(length=8 * 1023), {'gather', 'heads'}),  # a device has no two halves
    (dict(length=8 * 1023, window=64), {'gather', 'ring', 'heads'}),
    (dict(length=1023), {'gather'}),
  ],
)
def test_ways_that_shapes_allow(changes, ways):
  assert set(estimates(dataclasses.replace(ROW, **changes))) == ways


def test_the_fastest_way():
  choice = lambda **changes: fastest(estimates(dataclasses.replace(ROW, **changes)))
  assert choice(length=512, masked_by_array=True) == 'gather'
  assert choice() == 'heads'
  assert choice(masked_by_array=True) == 'ring'  # the masks of whole rows do not fit
  assert choice(masked_by_array=True, max_segments=64) == 'heads'
  assert choice(masked_by_array=True, max_segments=1024) == 'ring'  # sums of 2 GiB
  assert choice(window=4096) == 'ring'
  assert choice(length=8 * 1023) == 'heads'
  assert choice(length=2**16 - 8, kv_heads=4) == 'gather'  # the only way that is left


def test_each_estimate_grows_with_the_work():
  for changes in (dict(), dict(window=4096), dict(masked_by_array=True), dict(fused=False)):
    shapes = dataclasses.replace(ROW, **changes)
    for more in (dict(rows=2), dict(length=2 * 131_072), dict(heads=64, kv_heads=16)):
      larger = estimates(dataclasses.replace(shapes, **more))
      for way, one in estimates(shapes).items():
        assert larger[way].seconds > one.seconds
        assert larger[way].sent > one.sent * 0.99


def test_plain_xla_reads_and_writes_its_scores():
  fused, plain = estimates(ROW), estimates(dataclasses.replace(ROW, fused=False))
  assert plain['ring'].seconds > 2 * fused['ring'].seconds
  assert plain['heads'].seconds > 2 * fused['heads'].seconds
  assert plain['gather'] == fused['gather']
