"""The schedule of a pipeline, and the ways of layers to their stages."""

import functools
import types

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen import meta
from jax.sharding import PartitionSpec

from paxlite.core.variable_names import REPEATED
from paxlite.experiments.gpt import GPT126M
from paxlite.layers.precision import weight_matmul
from paxlite.layers.precision.einsum import FP8_COLLECTIONS
from paxlite.layers.sown import LOSSES, SOWN, SUMMARIES
from paxlite.layers.transformer import RepeatedTransformer
from paxlite.losses.metrics import over_microbatches
from paxlite.losses.sown_losses import SownLosses
from paxlite.parallel import partitioning
from paxlite.pipeline.layer_facts import LayerFacts, layer_facts
from paxlite.pipeline.pipeline import PipelinedTransformer
from paxlite.pipeline.pipeline_schedule import PipelineSchedule
from paxlite.pipeline.stage_rows import StageRows
from paxlite.pipeline.stage_weights import StageLayout, StageWeights
from paxlite.training.microbatch_loop import in_microbatches

TWO_DEVICES = jax.sharding.AbstractMesh((2, 1, 1), ('data', 'replica', 'mdl'))
RULES = {**partitioning.DEFAULT_RULES, 'row_shards': ('data',)}


@pytest.mark.parametrize(
  ('stages', 'microbatches', 'repeats'), [(4, 8, 1), (4, 4, 3), (4, 2, 3), (3, 7, 2), (4, 2, 1)]
)
def test_groups_are_computed_in_order_and_as_soon_as_possible(stages, microbatches, repeats):
  schedule = PipelineSchedule(stages, microbatches, repeats)
  when = {}
  for t in range(schedule.ticks):
    for z in range(stages):
      repeat, microbatch, works = (int(x) for x in schedule.work(jnp.array(t), jnp.array(z)))
      if works:
        assert (repeat, microbatch, z) not in when
        when[repeat, microbatch, z] = t
  assert len(when) == repeats * microbatches * stages
  for (repeat, microbatch, z), t in when.items():
    if z:
      assert when[repeat, microbatch, z - 1] == t - 1
    elif repeat:
      assert when[repeat - 1, microbatch, stages - 1] < t
  if microbatches >= stages or repeats == 1:
    assert schedule.ticks == microbatches * repeats + stages - 1


@pytest.mark.parametrize(('stages', 'repeats'), [(4, 4), (4, 2), (2, 4), (3, 2), (6, 4), (4, 6)])
def test_every_group_of_layers_reaches_its_stage(stages, repeats):
  layout = StageLayout(stages, repeats, PartitionSpec(), ())
  stored = [[z * repeats + k for k in range(repeats)] for z in range(stages)]
  found = [[-1] * repeats for _ in range(stages)]
  for turn in layout.turns():
    assert sorted(turn.to) == list(range(stages))  # each stage receives one
    for z, to in enumerate(turn.to):
      found[to][turn.put[to]] = stored[z][turn.taken[z]]
  assert found == [[r * stages + z for r in range(repeats)] for z in range(stages)]


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('stages', 'microbatches', 'rows'), [(4, 8, 8), (4, 4, 8), (4, 6, 6), (4, 2, 4), (3, 4, 20)]
)
def test_rows_reach_the_first_stage_in_time_and_come_back_from_the_last(stages, microbatches, rows):
  """Also where stages own different numbers of rows. A pipeline of one layer doubles them."""
  schedule = PipelineSchedule(stages, microbatches, 1)
  ways = StageRows(schedule, (rows, 2, 3), 1)
  x = jnp.arange(1.0, rows * 6 + 1).reshape(rows, 2, 3)

  def through(x):
    before, entering = ways.start(x)
    after, leaving, entered = jnp.zeros_like(before), ways.filler(x.dtype), []
    for t in range(schedule.ticks):
      entered.append(entering[0])
      leaving = ways.send(leaving, -1)
      if t >= stages - 1:
        leaving = leaving.at[-1].set(2 * entered[t - (stages - 1)])
      after = ways.leave(after, leaving, jnp.array(t))
      before, entering = ways.enter(before, entering, jnp.array(t + 1))
    return ways.finish(after, leaving), jnp.stack(entered[:microbatches])

  y, pull, entered = jax.vjp(through, x, has_aux=True)
  np.testing.assert_array_equal(entered, ways.split(x))
  np.testing.assert_array_equal(y, 2 * x)
  np.testing.assert_array_equal(pull(x)[0], 2 * x)


def test_frozen_weights_have_no_sums_of_gradients():
  """A function with a derivative of its own would give all of its arguments one."""
  facts = LayerFacts([(None,)] * 2, [np.dtype('float32')] * 2, ['add'] * 2, False, False, False)

  def loss(trained, frozen):
    weights = StageWeights({'a': trained, 'b': frozen}, facts, 2, 1, ())
    x, sums = weights.in_turn(jnp.sum(trained), weights.sums[0])
    return x + sum(map(jnp.sum, sums))

  w = jnp.ones((4, 3))
  traced = jax.make_jaxpr(jax.grad(loss))(w, w)
  barriers = [e for e in traced.jaxpr.eqns if e.primitive.name == 'optimization_barrier']
  assert [len(e.invars) for e in barriers] == [2]  # x and the sum of the trained weight


@pytest.mark.parametrize(
  ('rules', 'dtype'),
  [({'batch': None}, 'float32'), ({}, 'bfloat16'), ({'row_shards': None}, 'bfloat16')],
)
def test_only_gradients_that_a_device_adds_up_itself_are_float32(rules, dtype, monkeypatch):
  """Others would be sent in float32 at each tick."""
  monkeypatch.setattr(weight_matmul, 'active_platform', lambda: 'cuda')
  x, w = jnp.ones((2, 8, 16), jnp.bfloat16), jnp.ones((16, 4), jnp.bfloat16)
  monkeypatch.setattr(partitioning, 'active_mesh', lambda: (TWO_DEVICES, RULES | rules))
  _, pull = jax.vjp(lambda w: weight_matmul.weight_matmul('BTD,DF->BTF', x, w), w)
  assert pull(jnp.ones((2, 8, 4), jnp.bfloat16))[0].dtype == dtype


def test_what_microbatches_do_to_each_variable():
  """Gradients are added, and the largest values that FP8 has seen are combined by their maximum."""
  e = GPT126M(
    NUM_LAYERS=2, MODEL_DIMS=16, HIDDEN_DIMS=32, NUM_HEADS=2, VOCAB_SIZE=32, HEADS_SPAN_MODEL=True,
    USE_REPEATED_LAYER=True, USE_FP8=True,
  )  # fmt: skip
  task = fdl.build(e.build_task())

  def stack():
    variables = meta.unbox(task.model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    fp8 = task.begin_step({k: variables[k] for k in FP8_COLLECTIONS if k in variables})
    return {
      k: v['transformer'][REPEATED] for k, v in {'params': variables['params'], **fp8}.items()
    }

  block = task.model.transformer_tpl().layer_tpl(parent=None)
  shapes = jax.eval_shape(stack)
  facts = layer_facts(block, shapes, jax.ShapeDtypeStruct((1, 8, 16), jnp.bfloat16), False, None)
  paths = [path[0].key for path, _ in jax.tree.leaves_with_path(shapes)]
  assert set(paths) > {'params'}
  assert facts.combine == ['add' if path == 'params' else 'max' for path in paths]


class Sowing(nn.Module):
  """A layer whose loss term and summaries depend on which tokens are together."""

  @nn.compact
  def __call__(self, x_BTD, positions_BT, segment_ids_BT):
    w_D = self.param('w', nn.initializers.normal(1.0), [x_BTD.shape[-1]])
    x_BTD += jnp.tanh(x_BTD * w_D)
    everything = jnp.ones(x_BTD.shape[:2], bool)
    is_token_BT = everything if segment_ids_BT is None else segment_ids_BT > 0
    mean = (x_BTD.mean(-1) * is_token_BT).sum() / jnp.maximum(is_token_BT.sum(), 1)
    self.sow(LOSSES, 'square', mean**2)
    self.sow(SUMMARIES, 'mean', mean)
    self.sow(SUMMARIES, 'max_mean', mean)
    return x_BTD


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize('seed', range(12))
def test_losses_of_layers_weigh_microbatches_as_without_stages(seed):
  """Padding fills the microbatches unequally, and some of them wholly."""
  rng = np.random.default_rng(seed)
  stages, repeats, microbatches, rows = (
    int(rng.integers(least, most + 1)) for least, most in ((2, 3), (1, 2), (2, 5), (1, 3))
  )
  B, T, D = rows * microbatches, 4, 3
  layers = stages * repeats * int(rng.integers(1, 3))
  lengths = rng.integers(0, T + 1, B) * (rng.random(B) < 0.7)
  lengths[0] = T
  batch = {
    'ids': np.zeros((B, T), np.int32), 'x': rng.normal(size=(B, T, D)).astype(np.float32),
    'segment_ids': (np.arange(T) < lengths[:, None]).astype(np.int32),
  }  # fmt: skip
  whole = RepeatedTransformer(layers, Sowing)
  staged = PipelinedTransformer(
    layers, Sowing, num_stages=stages, num_microbatches=microbatches, num_repeats=repeats
  )

  def sown(stack, params, batch):
    read = batch['x'], batch['segment_ids'], batch['segment_ids']
    _, found = stack.apply({'params': params}, *read, mutable=SOWN)
    loss, outputs = SownLosses(), types.SimpleNamespace(sown=found)
    return loss(outputs, batch), loss.weight(batch), loss.metrics(outputs, batch)

  def in_stages(params):
    total, weight, metrics = sown(staged, params, batch)
    return total / weight, {name: m.value for name, m in metrics.items()}

  def in_turn(params):
    parts = in_microbatches(batch, microbatches)
    total_I, weight_I, metrics = jax.vmap(functools.partial(sown, whole, params))(parts)
    values = {name: over_microbatches(name, m).value for name, m in metrics.items()}
    return total_I.sum() / weight_I.sum(), values

  read = batch['x'], batch['segment_ids'], batch['segment_ids']
  params = jax.jit(whole.init)(jax.random.key(seed), *read)['params']
  found, expected = (
    jax.jit(jax.value_and_grad(compute, has_aux=True))(params) for compute in (in_stages, in_turn)
  )
  error = jax.tree.map(lambda x, y: float(abs(x - y).max() / abs(y).max()), found, expected)
  assert max(jax.tree.leaves(error)) < 1e-5, error
