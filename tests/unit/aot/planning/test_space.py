"""The candidates of a plan: batches that a mesh can hold, and their names."""

from paxlite.aot.planning import space
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


def test_only_a_pipeline_with_enough_microbatches_repeats():
  experiment = TinyGPT(NUM_LAYERS=16, USE_REPEATED_LAYER=True)
  fixed = frozenset({'CHECKPOINT_POLICY', 'NUM_LOSS_CHUNKS', 'ATTENTION_BLOCK_SIZE'})
  repeats: dict[int, set[object]] = {}
  for c in Space(experiment, machine(), fixed, global_batch=16):
    stages = c.layout.sizes.get('stage', 1)
    repeats.setdefault(stages, set()).add(c.values['NUM_PIPELINE_REPEATS'])
    if stages > 1:
      c.of(experiment)
  assert repeats == {1: {1}, 2: {1, 2, 4}, 4: {1, 2, 4}, 8: {1, 2}}  # 8 stages of two layers
  one_part = Space(experiment, machine(), fixed | {'NUM_MICROBATCHES'}, global_batch=16)
  assert {c.values['NUM_PIPELINE_REPEATS'] for c in one_part} == {1}


def test_what_an_experiment_has_is_a_candidate():
  """Two microbatches in four stages of two groups, and the other value that is possible."""
  experiment = TinyGPT(
    NUM_LAYERS=8, USE_REPEATED_LAYER=True, NUM_MICROBATCHES=2, NUM_PIPELINE_REPEATS=2,
    MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[4, 1, 1, 1],
    DCN_MESH_SHAPE=[1, 1, 1, 1],
  )  # fmt: skip
  fixed = frozenset({*space.MESH, 'NUM_MICROBATCHES'})
  of = lambda *more: {
    c.values['NUM_PIPELINE_REPEATS']
    for c in Space(experiment, machine(devices=4), fixed | {*more}, global_batch=8)
  }
  assert of('NUM_PIPELINE_REPEATS') == {2}
  assert of() == {1, 2}


def test_repeats_of_three_stages():
  experiment = TinyGPT(NUM_LAYERS=12, USE_REPEATED_LAYER=True)
  repeats = {
    c.values['NUM_PIPELINE_REPEATS']
    for c in Space(experiment, machine(devices=3), global_batch=12)
    if c.layout.sizes.get('stage', 1) == 3
  }
  assert repeats == {1, 2, 4}


def test_batches_are_tried_where_none_is_given():
  candidates = Space(TinyGPT(), machine())
  found = candidates.batches(shards=4, stages=1)
  assert list(found) == [(rows, 1) for rows in (4, 8, 16, 32, 64, 128, 256)]
  assert len(list(candidates.batches(shards=2, stages=4))) == 1 + 2 + 3 + 4 + 4


def test_the_host_and_other_backends_are_tried_where_they_can_be():
  """Host memory only where its distance is known, FP8 and int8 only if asked, and never both."""
  near, far = machine(host_bandwidth=1e9), machine()
  combinations = lambda where, tried=(): Space(
    TinyGPT(), where, tried=frozenset(tried)
  ).combinations()
  named = lambda name, *about: {c[name] for c in combinations(*about)}
  assert named('OFFLOAD_OPTIMIZER', near) == {False, True}
  assert named('OFFLOAD_ACTIVATIONS', near) == {(), ('iteration_input',)}
  assert named('OFFLOAD_OPTIMIZER', far) == {False}
  assert named('OFFLOAD_ACTIVATIONS', far) == {()}
  assert named('USE_INT8', near) == {'off'}
  pairs = {(c['USE_FP8'], c['USE_INT8']) for c in combinations(far, ('USE_FP8', 'USE_INT8'))}
  assert pairs == {(True, 'off'), (False, 'off'), (False, 'forward'), (False, 'forward_backward')}
  for found in combinations(near):
    attributes = Candidate(Layout(AXES, (1, 8, 1), (1, 1, 1)), 8, 1, found).attributes
    assert TinyGPT().replaced(**attributes).OFFLOAD_ACTIVATIONS in ([], ['iteration_input'])


def test_a_candidate_says_how_it_runs():
  layout = Layout(AXES, (1, 2, 4), (1, 3, 1))
  assert layout.sizes == {'replica': 1, 'data': 6, 'mdl': 4}
  assert str(Layout(AXES, (1, 8, 1), (8, 1, 1))) == 'replica 1·8 × data 8'
  assert str(Layout(AXES, (8, 1, 1), (1, 8, 1))) == 'replica 8 × data 1·8'
  values = {**VALUES, 'NUM_LOSS_CHUNKS': 4, 'ATTENTION_BLOCK_SIZE': 512, 'USE_FP8': True}
  one = Candidate(layout, 48, 2, values)
  said = (
    'data 2·3 × mdl 4, 48 rows, in 2 parts, SAVE_NOTHING, loss chunks 4, unrolled, blocks of 512'
  )
  assert str(Candidate(layout, 48, 2, values | {'NUM_PIPELINE_REPEATS': 1})) == f'{said}, USE_FP8'
  assert str(one) == f'{said}, USE_FP8'
  off = {'USE_FP8': False, 'USE_INT8': 'off', 'OFFLOAD_ACTIVATIONS': (), 'OFFLOAD_OPTIMIZER': False}
  assert str(Candidate(layout, 48, 2, values | off)) == said
  more = {'USE_FP8': False, 'USE_INT8': 'forward', 'OFFLOAD_ACTIVATIONS': ('iteration_input',)}
  assert str(Candidate(layout, 48, 2, values | more)) == (
    f'{said}, USE_INT8 forward, OFFLOAD_ACTIVATIONS'
  )
  plain = Candidate(Layout(AXES, (1, 1, 1), (1, 1, 1)), 1, 1, {'USE_REPEATED_LAYER': True})
  assert str(plain) == 'one device, 1 rows, repeated'
