"""The candidates of a plan: batches that a mesh can hold, and their names."""

import pytest

from paxlite.aot.planning.space import Candidate, Layout, Space
from paxlite.experiments.demo import TinyGPT
from tests.unit.aot.planning.machines import machine

AXES = ('replica', 'data', 'mdl')
VALUES = {'CHECKPOINT_POLICY': 'SAVE_NOTHING', 'NUM_LOSS_CHUNKS': 1, 'USE_REPEATED_LAYER': False}


def microbatches(fixed=(), shards=4, global_batch=16, stages=1) -> list[int]:
  experiment = TinyGPT(NUM_MICROBATCHES=2)
  candidates = Space(experiment, machine(), frozenset(fixed), global_batch=global_batch)
  found = list(candidates.batches(shards, stages))
  assert {rows for rows, _ in found} <= {global_batch}
  return [parts for _, parts in found]


def test_each_shard_has_equal_parts_of_a_batch():
  assert microbatches() == [1, 2, 4]
  assert microbatches(global_batch=12) == [1]
  assert microbatches(global_batch=18, shards=8) == []
  assert microbatches(fixed=['NUM_MICROBATCHES']) == [2]


def test_a_pipeline_has_a_microbatch_for_each_stage():
  assert microbatches(stages=4, shards=2) == [4, 8]
  assert microbatches(stages=4, shards=2, fixed=['NUM_MICROBATCHES']) == [2]


@pytest.mark.parametrize('repeats', [1, 2, 3])
def test_stages_hold_equal_groups_of_layers(repeats):
  """An experiment keeps its repeats: a stage has as many layers, or twice as many, or so on."""
  experiment = TinyGPT(NUM_LAYERS=24, USE_REPEATED_LAYER=True, NUM_PIPELINE_REPEATS=repeats)
  found = {}
  for c in Space(experiment, machine(devices=24), frozenset({'NUM_MICROBATCHES'}), 48):
    found.setdefault(c.layout.sizes.get('stage', 1), c)
  assert set(found) == {n for n in (1, 2, 3, 4, 6, 8, 12, 24) if n == 1 or 24 // n % repeats == 0}


def test_batches_are_tried_where_none_is_given():
  candidates = Space(TinyGPT(), machine())
  found = candidates.batches(shards=4, stages=1)
  assert list(found) == [(rows, 1) for rows in (4, 8, 16, 32, 64, 128, 256)]
  assert len(list(candidates.batches(shards=2, stages=4))) == 1 + 2 + 3 + 4 + 4


def test_what_rounds_differently_or_waits_for_the_host_is_never_chosen():
  experiment = TinyGPT(OFFLOAD_OPTIMIZER=True, USE_INT8='forward')
  for values in Space(experiment, machine()).combinations():
    made = Candidate(Layout(AXES, (1, 8, 1), (1, 1, 1)), 8, 1, values).of(experiment)
    assert (made.OFFLOAD_OPTIMIZER, made.USE_INT8, made.USE_FP8) == (True, 'forward', False)


def test_a_candidate_says_how_it_runs():
  layout = Layout(AXES, (1, 2, 4), (1, 3, 1))
  assert layout.sizes == {'replica': 1, 'data': 6, 'mdl': 4}
  assert str(Layout(AXES, (1, 8, 1), (8, 1, 1))) == 'replica 1·8 × data 8'
  assert str(Layout(AXES, (8, 1, 1), (1, 8, 1))) == 'replica 8 × data 1·8'
  said = 'data 2·3 × mdl 4, 48 rows, in 2 parts, SAVE_NOTHING, loss chunks 4, unrolled'
  assert str(Candidate(layout, 48, 2, {**VALUES, 'NUM_LOSS_CHUNKS': 4})) == said
  one = Layout(AXES, (1, 1, 1), (1, 1, 1))
  plain = Candidate(one, 1, 1, VALUES | {'USE_REPEATED_LAYER': True})
  assert str(plain) == 'one device, 1 rows, SAVE_NOTHING, repeated'
