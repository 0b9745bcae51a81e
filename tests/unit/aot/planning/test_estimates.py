"""Checks what the planner knows of a model without compiling it: work, state, memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from paxlite.aot.analysis import sharded_task
from paxlite.aot.planning import space
from paxlite.aot.planning.estimate import Estimator, Step
from paxlite.aot.planning.model import ROWS, Model, product_flops
from paxlite.aot.planning.space import Candidate, Layout, Space
from paxlite.experiments.demo import TinyGPT
from paxlite.layers.attention import cudnn_call
from paxlite.layers.moe import megablox_matmul
from paxlite.optim.moments import is_moment
from tests.unit.aot.planning.machines import machine

HOST = machine(platform='gpu')
VALUES = {'CHECKPOINT_POLICY': 'SAVE_EVERYTHING', 'NUM_LOSS_CHUNKS': 1, 'USE_REPEATED_LAYER': False}
AXES = ('replica', 'data', 'mdl')
DATA = Layout(AXES, (1, 8, 1), (1, 1, 1))


@pytest.fixture(scope='module')
def model() -> Model:
  e = TinyGPT(
    NUM_LAYERS=6, NUM_HEADS=4, MODEL_DIMS=64, VOCAB_SIZE=1024, MAX_SEQ_LEN=16, HIDDEN_DIMS=192
  )
  return Model(e, jax.devices()[0])


def flops(model, values) -> float:
  """FLOPs of a step for each token."""
  unit, rest = (sum(work(values).flops.values()) for work in (model.unit, model.rest))
  return (model.units * unit + rest) / ROWS / model.experiment.MAX_SEQ_LEN


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


@pytest.mark.parametrize('has_logit', [False, True])
def test_flops_of_cudnn(has_logit):
  """Two products forward and five backward; the causal mask leaves out half of each."""
  B, T, N, K, H = 13, 64, 4, 2, 8
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  options = cudnn_call.Options(0.5)

  def loss(qkv, ids):
    logit = jnp.zeros((B, N)) if has_logit else None
    return cudnn_call.attend(qkv, ids, logit, None, options).astype(jnp.float32).sum()

  qkv = array(B, T, N, H), array(B, T, K, H), array(B, T, K, H)
  ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
  found = list(product_flops(jax.make_jaxpr(jax.grad(loss))(qkv, ids).jaxpr))
  assert sum(n for _, n in found) == 7 * B * N * T * T * H
  assert {dtype for dtype, _ in found} == {'bf16'}


def test_flops_of_groups_of_rows():
  """One forward and two backward, of the rows at equal load, in a kernel that has room for more."""
  D, F, E, rows, room = 256, 128, 4, 13 * 64, 1280
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def loss(arrays):
    w_EDF, x = arrays
    with jax.named_scope(f'rows_{rows}_of_{room}'):
      sizes_E = jnp.full(E, 256, jnp.int32)
      return megablox_matmul.product(jnp.sin(x), w_EDF, sizes_E).astype(jnp.float32).sum()

  traced = jax.make_jaxpr(jax.grad(loss))((array(E, D, F), array(room, D))).jaxpr
  assert sum(n for _, n in product_flops(traced)) == 3 * 2 * rows * D * F


def test_a_loop_counts_as_often_as_it_runs():
  w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  loop = lambda w: jax.lax.scan(lambda x, _: (x @ w, None), w, length=5)[0]
  assert list(product_flops(jax.make_jaxpr(loop)(w).jaxpr)) == [('f32', 5 * 2 * 8**3)]


def test_policies_keep_less(model):
  one_device = Layout(AXES, (1, 1, 1), (1, 1, 1))
  estimator = Estimator(model, HOST)
  kept = [
    estimator.bytes(model.unit(VALUES | {'CHECKPOINT_POLICY': p}), one_device)
    for p in (
      'SAVE_NOTHING', 'SAVE_OUT_PROJ', 'SAVE_QKV_ATTENTION_OUT_PROJ', 'SAVE_DOT_WITH_NO_BATCH_DIM',
      'SAVE_EVERYTHING',
    )
  ]  # fmt: skip
  assert kept == sorted(kept)
  e = model.experiment
  number = 4 * e.MAX_SEQ_LEN * ROWS  # of each token
  assert kept[:2] == [e.MODEL_DIMS * number, 2 * e.MODEL_DIMS * number]
  hidden = e.HIDDEN_DIMS * number
  assert kept[3] - kept[2] == hidden


@pytest.mark.parametrize('repeated', [False, True])
@pytest.mark.parametrize('shape', [(2, 4, 1), (1, 2, 4), (1, 1, 1)])
def test_bytes_of_the_state(model, shape, repeated):
  """They equal those of the abstract state on the mesh, to the byte."""
  e = model.experiment.replaced(ICI_MESH_SHAPE=list(shape), USE_REPEATED_LAYER=repeated)
  task = sharded_task(e, jax.sharding.AbstractMesh(shape, AXES))
  sizes = [
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(task.abstract)
  ]
  assert model.state(e).all == sum(sizes)


def test_candidates_differ_as_they_should(model):
  """More rows take more memory and time, recomputing less memory, more devices less of both."""
  estimator = Estimator(model, HOST)
  one = estimator.estimate(Candidate(DATA, 64, 1, VALUES))
  more = estimator.estimate(Candidate(DATA, 128, 1, VALUES))
  assert more.memory > one.memory
  assert more.seconds > one.seconds
  lean = Candidate(DATA, 64, 1, VALUES | {'CHECKPOINT_POLICY': 'SAVE_NOTHING'})
  assert estimator.estimate(lean).memory < one.memory
  whole = Step(Candidate(DATA, 64, 1, VALUES), estimator)
  assert Step(lean, estimator).products > whole.products
  parts = Step(Candidate(DATA, 64, 4, VALUES), estimator)
  assert parts.kept == pytest.approx(whole.kept / 4)
  copies = estimator.estimate(Candidate(DATA._replace(near=(8, 1, 1)), 64, 1, VALUES))
  assert copies.state == pytest.approx(8 * one.state, rel=0.1)


def test_what_a_device_has_of_an_activation(model):
  """Its rows, and its part of heads or units: of four times the rows, a quarter."""
  estimator = Estimator(model, HOST)
  kept = lambda near: Step(Candidate(Layout(AXES, near, (1, 1, 1)), 64, 1, VALUES), estimator).kept
  assert kept((8, 1, 1)) == kept((1, 8, 1)) == kept((1, 2, 4)) == kept((1, 1, 1)) / 8


def test_repeats_make_a_pipeline_wait_less(model):
  """Each of 3 stages has 2 layers: there are 6 + 2 ticks of both, or 12 + 2 ticks of one."""
  layout = Layout(('stage', *AXES), (3, 1, 1, 1), (1, 1, 1, 1))
  candidate = Candidate(layout, 6, 6, VALUES | {'USE_REPEATED_LAYER': True})
  repeated = (model.experiment.replaced(NUM_PIPELINE_REPEATS=r) for r in (1, 2))
  one, two = (Step(candidate, Estimator(model.of(e, has_same_layers=True), HOST)) for e in repeated)
  assert two.kept / one.kept == pytest.approx((14 / 2) / 8)
  assert 7 / 8 < two.products / one.products < 1
  assert sum(two.sent) > sum(one.sent)


def test_gpus_have_no_loop_over_layers_that_keep_their_products(model):
  """Copies of a loop count where the program has one; the experiment decides that for each mesh."""
  data, mdl = (Layout(AXES, shape, shape) for shape in ((1, 8, 1), (1, 4, 2)))

  def traffic(platform: str, layout: Layout, repeated: bool, policy: str) -> float:
    estimator = Estimator(model, machine(platform=platform))
    values = VALUES | {'CHECKPOINT_POLICY': policy, 'USE_REPEATED_LAYER': repeated}
    return Step(Candidate(layout, 16, 1, values), estimator).traffic

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
  layout = Layout(('stage', *AXES), (2, 1, 4, 1), (1, 1, 1, 1))
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
  """Moments and inputs of layers leave the device."""
  lean = VALUES | {'CHECKPOINT_POLICY': 'SAVE_NOTHING', 'USE_REPEATED_LAYER': True}
  one = Candidate(DATA, 64, 1, lean)
  e, before = model.experiment, Estimator(model, HOST).estimate(one)
  moved = model.of(e.replaced(OFFLOAD_OPTIMIZER=True), has_same_layers=True)
  estimate = Estimator(moved, HOST).estimate(one)
  task = sharded_task(
    e.replaced(ICI_MESH_SHAPE=[1, 8, 1]), jax.sharding.AbstractMesh((1, 8, 1), AXES)
  )
  moments = sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(task.abstract.replace(params=None))
    if is_moment(x)
  )
  assert before.state - estimate.state == moments > 0
  assert estimate.memory < before.memory

  inputs = e.replaced(OFFLOAD_ACTIVATIONS=['iteration_input'])
  fewer = Estimator(model.of(inputs, has_same_layers=False), HOST)
  assert Step(one, Estimator(model, HOST)).kept > Step(one, fewer).kept == 0
  assert fewer.estimate(one).memory < before.memory


def test_gradients_in_bfloat16_take_half_of_the_memory(model):
  e = model.experiment.replaced(GRADIENT_DTYPE='bfloat16')
  narrow = model.of(e, has_same_layers=True)
  layout = Layout(AXES, (8, 1, 1), (1, 1, 1))
  one = Candidate(layout, 8, 1, VALUES | {'NUM_LOSS_CHUNKS': 4})
  wide, less = (Estimator(m, HOST).estimate(one).memory for m in (model, narrow))
  trained = model.state(model.experiment.replaced(**layout.values)).trained
  assert 0.4 * trained < wide - less <= 0.5 * trained


def test_layouts_are_those_that_the_model_can_use(model):
  found = space.layouts(model.experiment, HOST)
  assert len(set(found)) == len(found)
  for layout in found:
    assert math.prod(layout.sizes.values()) == 8
    assert 4 % layout.sizes['mdl'] == 0
    assert 6 % layout.sizes.get('stage', 1) == 0
  assert {layout.sizes['mdl'] for layout in found} == {1, 2, 4}
  hosts = dataclasses.replace(HOST, devices=32)
  for layout in space.layouts(model.experiment, hosts):
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
