"""Checks what the planner knows of a model without compiling it: work, state, memory."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from paxlite.aot.analysis import sharded_task
from paxlite.aot.planning import layouts
from paxlite.aot.planning.candidates import Candidate, Space
from paxlite.aot.planning.correction import Correction
from paxlite.aot.planning.estimate import Estimator
from paxlite.aot.planning.extents import Amounts, Extent, Shares
from paxlite.aot.planning.features import Features
from paxlite.aot.planning.layouts import Layout
from paxlite.aot.planning.machine import Machine
from paxlite.aot.planning.model import Model
from paxlite.experiments.demo import TinyGPT
from paxlite.optim.moments import is_moment

HOST = Machine('here', 'gpu', 8, 8, 1e9, {'': 1e12}, 1e11, 1e10, 1e9)
VALUES = {'CHECKPOINT_POLICY': 'SAVE_EVERYTHING', 'NUM_LOSS_CHUNKS': 1, 'USE_REPEATED_LAYER': False}


@pytest.fixture(scope='module')
def model() -> Model:
  e = TinyGPT(
    NUM_LAYERS=6, NUM_HEADS=4, MODEL_DIMS=64, VOCAB_SIZE=1024, MAX_SEQ_LEN=16, HIDDEN_DIMS=192
  )
  return Model(e, jax.devices()[0])


def flops(model, values) -> float:
  """FLOPs of a step for each token."""
  unit, rest = model.unit(values), model.rest(values)
  total = model.units * sum(p.flops for p in unit.products) + sum(p.flops for p in rest.products)
  return total / model.sizes.rows / model.sizes.length


def test_flops(model):
  """They are those of the formula with attention in full; recomputing adds the forward pass."""
  e = model.experiment
  causal = 12 * e.NUM_LAYERS * e.MODEL_DIMS * e.MAX_SEQ_LEN / 2
  full = e.flops_per_token + causal
  assert flops(model, VALUES) == pytest.approx(full, rel=0.02)
  again = full + (full - 6 * e.VOCAB_SIZE * e.MODEL_DIMS) / 3
  assert flops(model, VALUES | {'CHECKPOINT_POLICY': 'SAVE_NOTHING'}) == pytest.approx(
    again, rel=0.1
  )


def test_policies_keep_less(model):
  kept = [
    sum(model.unit(VALUES | {'CHECKPOINT_POLICY': p}).saved.values())
    for p in ('SAVE_NOTHING', 'SAVE_OUT_PROJ', 'SAVE_DOT_WITH_NO_BATCH_DIM', 'SAVE_EVERYTHING')
  ]
  assert kept == sorted(kept)
  row = model.experiment.MODEL_DIMS * 4 * model.sizes.length * model.sizes.rows
  assert kept[:2] == [row, 2 * row]


@pytest.mark.parametrize('repeated', [False, True])
@pytest.mark.parametrize('shape', [(2, 4, 1), (1, 2, 4), (1, 1, 1)])
def test_bytes_of_the_state(model, shape, repeated):
  """They equal those of the abstract state on the mesh, to the byte."""
  e = model.experiment.replaced(ICI_MESH_SHAPE=list(shape), USE_REPEATED_LAYER=repeated)
  devices = jax.devices()[0]
  abstract = jax.sharding.AbstractMesh(shape, ('replica', 'data', 'mdl'))
  del devices
  task = sharded_task(e, abstract)
  sizes = [
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(task.abstract)
  ]
  assert model.state(VALUES, e).all == sum(sizes)


def test_candidates_differ_as_they_should(model):
  """More rows take more memory and time, recomputing less memory, more devices less of both."""
  estimator = Estimator(model, HOST)
  layout = Layout(('replica', 'data', 'mdl'), (1, 8, 1), (1, 1, 1))
  one = estimator.estimate(Candidate(layout, 64, 1, VALUES))
  more = estimator.estimate(Candidate(layout, 128, 1, VALUES))
  assert more.memory > one.memory
  assert more.seconds > one.seconds
  again = estimator.estimate(
    Candidate(layout, 64, 1, VALUES | {'CHECKPOINT_POLICY': 'SAVE_NOTHING'})
  )
  assert again.memory < one.memory
  assert again.products > one.products
  parts = estimator.estimate(Candidate(layout, 64, 4, VALUES))
  assert parts.saved == pytest.approx(one.saved / 4)
  copies = estimator.estimate(Candidate(layout._replace(near=(8, 1, 1)), 64, 1, VALUES))
  assert copies.state == pytest.approx(8 * one.state, rel=0.1)


def test_repeats_make_a_pipeline_wait_less(model):
  """Each of 3 stages has 2 layers: there are 6 + 2 ticks of both, or 12 + 2 ticks of one."""
  estimator = Estimator(model, HOST)
  layout = Layout(('stage', 'replica', 'data', 'mdl'), (3, 1, 1, 1), (1, 1, 1, 1))
  values = VALUES | {'USE_REPEATED_LAYER': True}
  one, two = (
    estimator.estimate(Candidate(layout, 6, 6, values | {'NUM_PIPELINE_REPEATS': r}))
    for r in (1, 2)
  )
  assert two.saved / one.saved == pytest.approx((14 / 2) / 8)
  assert 7 / 8 < two.products / one.products < 1
  assert two.sent > one.sent


def test_gpus_have_no_loop_over_layers_that_keep_their_products(model):
  """Copies of a loop count where the program has one; the experiment decides that for each mesh."""
  data, mdl = (Layout(('replica', 'data', 'mdl'), shape, shape) for shape in ((1, 8, 1), (1, 4, 2)))

  def traffic(platform: str, layout: Layout, repeated: bool, policy: str) -> float:
    estimator = Estimator(model, dataclasses.replace(HOST, platform=platform))
    values = VALUES | {'CHECKPOINT_POLICY': policy, 'USE_REPEATED_LAYER': repeated}
    return estimator.estimate(Candidate(layout, 16, 1, values)).traffic

  for platform, layout, policy, has_loop in (
    ('gpu', data, 'SAVE_DOT_WITH_NO_BATCH_DIM', False),
    ('gpu', data, 'SAVE_NOTHING', True),
    ('gpu', mdl, 'SAVE_DOT_WITH_NO_BATCH_DIM', True),
    ('tpu', data, 'SAVE_DOT_WITH_NO_BATCH_DIM', True),
  ):
    repeated, unrolled = (traffic(platform, layout, r, policy) for r in (True, False))
    assert (repeated > unrolled) == has_loop, (platform, layout, policy)


@pytest.mark.slow
def test_a_pipeline_that_gathers_once_holds_the_weights_of_its_stage():
  e = TinyGPT(
    NUM_LAYERS=12, MODEL_DIMS=512, HIDDEN_DIMS=2048, MAX_SEQ_LEN=16, VOCAB_SIZE=1024,
    USE_REPEATED_LAYER=True,
  )  # fmt: skip
  layout = Layout(('stage', 'replica', 'data', 'mdl'), (2, 1, 4, 1), (1, 1, 1, 1))
  one = Candidate(layout, 16, 4, VALUES | {'USE_REPEATED_LAYER': True})
  memory = {}
  for changes in ((), ('GATHER_STAGES_ONCE', False), ('DROPOUT_PROB', 0.1)):
    changed = e.replaced(**dict([changes] if changes else []))
    memory[changes[:1]] = Estimator(Model(changed, jax.devices()[0]), HOST).estimate(one).memory
  weights = 12 / 2 * 4 * (4 * 512**2 + 2 * 512 * 2048)  # bytes of the layers of a stage
  assert memory[()] > memory[('GATHER_STAGES_ONCE',)] + weights
  assert memory[()] > memory[('DROPOUT_PROB',)]


@pytest.mark.slow
def test_what_is_on_the_host(model):
  """Moments and inputs of layers leave the device, and cross the bus once each way in a step."""
  machine = dataclasses.replace(HOST, host=1e9)
  estimator = Estimator(model, machine)
  values = VALUES | {'CHECKPOINT_POLICY': 'SAVE_NOTHING', 'USE_REPEATED_LAYER': True}
  values |= {'OFFLOAD_ACTIVATIONS': ()}
  layout = Layout(('replica', 'data', 'mdl'), (1, 8, 1), (1, 1, 1))
  plain = estimator.estimate(Candidate(layout, 64, 1, values | {'OFFLOAD_OPTIMIZER': False}))
  on_host = Candidate(layout, 64, 1, values | {'OFFLOAD_OPTIMIZER': True})
  estimate = estimator.estimate(on_host)
  task = sharded_task(
    model.experiment.replaced(ICI_MESH_SHAPE=[1, 8, 1]),
    jax.sharding.AbstractMesh((1, 8, 1), ('replica', 'data', 'mdl')),
  )
  moments = sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(task.abstract.replace(params=None))
    if is_moment(x)
  )
  assert plain.state - estimate.state == moments > 0
  assert estimate.memory < plain.memory
  assert estimate.seconds - plain.seconds == pytest.approx(2 * moments / machine.host)

  inputs = values | {'OFFLOAD_ACTIVATIONS': ('iteration_input',)}
  assert not model.unit(inputs).saved
  assert model.unit(inputs).offloaded == model.unit(values).saved
  fewer = estimator.estimate(Candidate(layout, 64, 1, inputs))
  assert fewer.copied == pytest.approx(2 * plain.saved / machine.host)
  assert fewer.memory < plain.memory


def test_gradients_in_bfloat16_take_half_of_the_memory(model):
  narrow = model.saving(model.experiment.replaced(GRADIENT_DTYPE='bfloat16'))
  layout = Layout(('replica', 'data', 'mdl'), (8, 1, 1), (1, 1, 1))
  one = Candidate(layout, 8, 1, VALUES | {'NUM_LOSS_CHUNKS': 4})
  wide, less = (Estimator(m, HOST).estimate(one).memory for m in (model, narrow))
  trained = model.state(VALUES, model.experiment.replaced(**layout.values)).trained
  assert 0.4 * trained < wide - less <= 0.5 * trained


def test_shares_of_an_array():
  """A device has its rows, its part of a length, and its part of a width that can be split."""
  shares = Shares(rows=0.5, context=2, mdl=4, experts=1)
  assert shares.of(Extent(rows=1, length=True, width=8)) == 0.5 / 2 / 4
  assert shares.of(Extent(rows=2, width=6)) == 0.25
  amounts = Amounts({Extent(rows=1): 10.0, Extent(): 3.0})
  assert amounts.on_a_device(shares) == 8.0


def test_layouts_are_those_that_the_model_can_use(model):
  found = layouts.layouts(model.experiment, HOST)
  assert len(set(found)) == len(found)
  for layout in found:
    assert math.prod(layout.sizes.values()) == 8
    assert 4 % layout.sizes['mdl'] == 0
    assert 6 % layout.sizes.get('stage', 1) == 0
  assert {layout.sizes['mdl'] for layout in found} == {1, 2, 4}
  hosts = dataclasses.replace(HOST, devices=32)
  for layout in layouts.layouts(model.experiment, hosts):
    assert math.prod(layout.near) == 8
    by_axis = dict(zip(layout.axes, layout.far, strict=True))
    assert by_axis['mdl'] == 1, 'activations of every layer stay within a host'


def test_what_is_kept_does_not_change(model):
  kept = frozenset({'CHECKPOINT_POLICY', 'NUM_MICROBATCHES', 'PERCORE_BATCH_SIZE'})
  e = model.experiment.replaced(PERCORE_BATCH_SIZE=2)
  found = list(Space(e, HOST, kept))
  assert {c.values['CHECKPOINT_POLICY'] for c in found} == {e.CHECKPOINT_POLICY}
  assert {(c.rows, c.microbatches) for c in found} == {(16, 1)}
  assert len({c.values['NUM_LOSS_CHUNKS'] for c in found}) > 1


def test_a_correction_is_exact_where_it_knows_and_near_where_it_is_alike(model):
  """Estimates that are wrong by a factor for each policy are right after one verdict of each."""
  candidates = list(Space(model.experiment, HOST, frozenset({'NUM_MICROBATCHES'}), global_batch=8))
  points = Features(candidates)
  numbers = points.of(candidates)
  policies = sorted({c.values['CHECKPOINT_POLICY'] for c in candidates})
  true = np.array([0.1 + 0.1 * policies.index(c.values['CHECKPOINT_POLICY']) for c in candidates])
  rng = np.random.default_rng(0)
  known = rng.choice(len(candidates), 4 * len(policies), replace=False)
  correction = Correction()
  parts = np.full((len(candidates), 2), 0.5)
  before = np.abs(correction.predict(numbers, parts)[0] - true).mean()
  correction.learn(numbers[known], parts[known], true[known], points.groups)
  mean, error = correction.predict(numbers, parts)
  assert np.abs(mean[known] - true[known]).max() < 0.01
  assert np.abs(mean - true).mean() < before / 8
  assert error[known].max() < 0.01 < error.max()
