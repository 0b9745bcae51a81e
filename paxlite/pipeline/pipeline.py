"""A repeated stack as a pipeline, in which each stage of the mesh holds a part of the layers."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import LazyRng

from paxlite.config.templates import Template
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REPEATED
from paxlite.layers.precision.einsum import FP8_COLLECTIONS
from paxlite.layers.remat import jax_policy
from paxlite.layers.sown import LOSSES, SOWN, is_maximum
from paxlite.layers.transformer import RepeatedTransformer
from paxlite.parallel import partitioning
from paxlite.parallel.partitioning import active_mesh, axes_of, shard
from paxlite.pipeline.layer_facts import LayerFacts, layer_facts
from paxlite.pipeline.pipeline_schedule import PipelineSchedule
from paxlite.pipeline.stage_rows import StageRows
from paxlite.pipeline.stage_weights import StageWeights


class PipelinedTransformer(RepeatedTransformer):
  """A RepeatedTransformer with stages that work on different microbatches at the same time.

  At each tick every stage applies one group of its layers to the activations that it holds, and
  passes them to the next stage. With one group for each stage this is GPipe's schedule
  (https://arxiv.org/abs/1811.06965), as GSPMD implements it (https://arxiv.org/abs/2105.04663,
  section 3.3). With R groups a microbatch goes around R times, as in the interleaved schedule of
  https://arxiv.org/abs/2104.04473. There are I · R + Z − 1 ticks, or more if there are fewer
  microbatches than stages. A stage is idle for Z − 1 of them: its results are not used.

  Parameters are those of RepeatedTransformer [L, …], so that a checkpoint fits any number of
  stages and repeats. Masks of dropout are those of a step that computes the same microbatches one
  after another, see task.Task.

  Shape letters: Z stages, I microbatches of b rows, which are split into Q parts; l layers of a
  group, n layers of a stage.
  """

  num_stages: int = 1  # Z, the size of the mesh axis 'stage'
  # I. If it does not divide the rows of a batch, the batch is not split.
  num_microbatches: int = 1
  num_repeats: int = 1  # R, the number of groups of layers in a stage
  # whether weights are gathered over data once a step, instead of once a tick
  gathers_once: bool = True

  @property
  def microbatches(self) -> int:
    return self.num_microbatches

  def layers(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    assert not inputs, 'blocks of a pipeline are called with activations, positions and segments'
    # text is generated token by token, for which the pipeline is not used
    if self.is_initializing() or self.is_mutable_collection('cache'):
      return super().layers(x_BTD, positions_BT, segment_ids_BT)
    B, T, D = x_BTD.shape
    I = self.num_microbatches if B % self.num_microbatches == 0 else 1
    stack: dict[str, PyTree] = {
      name: self.get_variable(name, REPEATED)
      for name in ('params', *FP8_COLLECTIONS)
      if self.has_variable(name, REPEATED)
    }
    rng = self.scope.rngs.get('dropout')  # type: ignore[union-attr]
    one = jax.ShapeDtypeStruct((B // I, T, D), x_BTD.dtype)
    facts = layer_facts(self.layer_tpl(parent=None), stack, one, segment_ids_BT is not None, rng)
    row_shards = self._row_shards(facts, B // I)
    weights = StageWeights(stack, facts, self.num_stages, self.num_repeats, row_shards)
    with _inside(row_shards):
      schedule = PipelineSchedule(self.num_stages, I, self.num_repeats)
      rows = StageRows(schedule, (B, T, D), _size(row_shards))
      positions_IQbT, segment_ids_IQbT = (
        None if a is None else rows.split(jnp.broadcast_to(a, (B, T)))
        for a in (positions_BT, segment_ids_BT)
      )
      run = self._applied(rng, row_shards)
      keys = None
      if facts.draws and rng is not None:
        keys = lambda i, layer: jax.random.split(
          rng.rng if I == 1 else jax.random.fold_in(rng.rng, i), self.num_layers
        )[layer]
      y_BTD, sown = self._ticks(rows, weights, run, x_BTD, (positions_IQbT, segment_ids_IQbT), keys)
    tokens_I = None if segment_ids_IQbT is None else (segment_ids_IQbT > 0).sum((1, 2, 3))
    self._sow(sown, schedule, tokens_I)
    return shard(y_BTD, 'outer_batch', 'residual_length', 'act_embed')

  def _row_shards(self, facts: LayerFacts, rows: int) -> tuple[str, ...]:
    """The mesh axes over which gradients of weights are added up once a step.

    XLA's partitioner does it at each tick where rows of different devices are not independent of
    each other: where experts choose among tokens, or one key draws the dropout of all rows.
    """
    active = active_mesh()
    if active is None or facts.draws or facts.sows or facts.has_experts:
      return ()
    axes = axes_of(active[1]['batch'])
    if not self.gathers_once:
      axes = axes[: axes.index('data')]
    while rows % _size(axes):
      axes = axes[:-1]
    return axes

  def _applied(
    self, rng: LazyRng | None, row_shards: tuple[str, ...]
  ) -> Callable[..., tuple[jax.Array, PyTree]]:
    """A layer as a function of the variables, inputs and keys of all stages, [Z, Q, …] each."""
    block = self.layer_tpl(parent=None)
    drawing = OneOfRepeated(self.layer_tpl, parent=None)

    def one(variables: PyTree, *inputs_and_key: jax.Array | None) -> tuple[jax.Array, PyTree]:
      *inputs, key = inputs_and_key
      if key is None or rng is None:
        return block.apply(variables, *inputs, mutable=SOWN)
      stack = {
        name: {REPEATED: jax.tree.map(lambda w: w[None], x)} for name, x in variables.items()
      }
      rngs = {'dropout': LazyRng.create(key, *rng.suffix)}
      return drawing.apply(stack, *inputs, rngs=rngs, mutable=SOWN)  # type: ignore

    active = active_mesh()
    on_stages = 'stage' if active is not None and 'stage' in active[0].shape else None
    if row_shards:
      one = jax.vmap(one, in_axes=(0, 0, 0, 0, None), spmd_axis_name=row_shards)
      return jax.vmap(one, spmd_axis_name=on_stages)
    over_stages = jax.vmap(one, spmd_axis_name=on_stages)

    def run(variables: PyTree, *arguments: jax.Array | None) -> tuple[jax.Array, PyTree]:
      *inputs, keys_Z = arguments
      y, sown = over_stages(*jax.tree.map(lambda x: x[:, 0], (variables, *inputs)), keys_Z)
      return y[:, None], sown

    return run

  def _ticks(
    self,
    rows: StageRows,
    weights: StageWeights,
    run: Callable[..., tuple[jax.Array, PyTree]],
    x_BTD: jax.Array,
    beside: Sequence[jax.Array | None],
    keys: Callable[[jax.Array, jax.Array], jax.Array] | None,
  ) -> tuple[jax.Array, PyTree]:
    """Runs all ticks.

    Args:
      rows: The way of the rows through the stages.
      weights: The variables of the stages.
      run: A layer, from `_applied`.
      x_BTD: The rows before the first layer.
      beside: Positions and segment ids, [I, Q, b, T].
      keys: Returns the key of a microbatch and a layer; None if layers draw nothing.

    Returns:
      The rows after the last layer, and what layers sow, [ticks, l, Z, …].
    """
    schedule = rows.schedule
    Z, l = self.num_stages, self.num_layers // (self.num_stages * self.num_repeats)
    stages = jnp.arange(Z)
    # stages are selected by a mask, because slicing a sharded dimension would gather it
    is_stage = lambda z: (stages == z).reshape(Z, 1, 1, 1, 1)

    # Rows travel to stage 0 from one layer to the next, and from the last stage in the second half
    # of a tick. XLA would start both transfers together with the one that the next tick waits for,
    # which is why the first layer of several has none.
    enters_at, leaves_at = 1 if l > 3 else 0, l // 2

    def tick(state: _State, t: jax.Array) -> tuple[_State, PyTree]:
      before, entering, arriving, waiting, leaving, after, sums = state
      first = entering
      if waiting is not None:
        waiting, again = schedule.exchange(waiting, arriving, t)
        waiting = shard(waiting, *_WAITING)
        repeat, _, _ = schedule.work(t, jnp.array(0))
        first = jnp.where(repeat == 0, entering, again)
      x_ZQbTD = rows.on_stages(jnp.where(is_stage(0), first, arriving))
      repeat_Z, microbatch_Z, works_Z = schedule.work(t, stages)
      inputs = [
        None if a is None else shard(a[microbatch_Z], 'layers', 'row_shards', 'batch', 'length')
        for a in beside
      ]

      def layer(j: int, x_ZQbTD: jax.Array, slots: list[jax.Array]) -> tuple[jax.Array, PyTree]:
        variables = weights.layer(j, slots, repeat_Z)
        keys_Z = None
        if keys is not None:
          keys_Z = jax.vmap(keys)(microbatch_Z, (repeat_Z * Z + stages) * l + j)
        y_ZQbTD, sown = run(variables, x_ZQbTD, *inputs, keys_Z)
        return rows.on_stages(y_ZQbTD), sown

      # A weight is never kept for the backward pass, which reads it again. XLA recomputes a layer
      # when the gradient of its result is there (prevent_cse). The last layer may be recomputed
      # before, while that gradient is on its way.
      layers = [
        jax.checkpoint(functools.partial(layer, j), policy=self._policy, prevent_cse=j < l - 1)
        for j in range(l)
      ]
      new_sums, sown_l = [], []
      for j in range(l):
        if j == enters_at:
          x_ZQbTD, entering = _barrier(x_ZQbTD, entering)
          before, entering = rows.enter(before, entering, t + 1)
        if j == leaves_at:
          if enters_at < leaves_at:
            x_ZQbTD, entering = _barrier(x_ZQbTD, entering)
          x_ZQbTD, leaving = _barrier(x_ZQbTD, leaving)
          leaving = rows.send(leaving, -1)
        x_ZQbTD, passed_on = weights.in_turn(x_ZQbTD, sums[j])
        slots, passed_on = weights.slots(passed_on, repeat_Z, works_Z)
        x_ZQbTD, sown = layers[j](x_ZQbTD, slots)
        new_sums.append(passed_on)
        sown_l.append(sown)
      sown = jax.tree.map(lambda *values: jnp.stack(values), *sown_l)
      leaving = jnp.where(is_stage(Z - 1), x_ZQbTD, leaving)
      after = rows.leave(after, leaving, t)
      # at the end of a tick, so that its gradient arrives while the last layer is recomputed
      arriving = rows.send(x_ZQbTD, 1)
      return _State(before, entering, arriving, waiting, leaving, after, new_sums), sown

    before, entering = rows.start(x_BTD)
    filler, waiting = rows.filler(x_BTD.dtype), None
    if self.num_repeats > 1:
      shape = Z, schedule.microbatches, *filler.shape[1:]
      waiting = shard(jnp.broadcast_to(filler[:, None], shape), *_WAITING)
    after = jnp.zeros_like(before)
    state = _State(before, entering, filler, waiting, filler, after, weights.sums)
    state, sown = jax.lax.scan(tick, state, jnp.arange(schedule.ticks))
    return rows.finish(state.after, state.leaving), sown

  @property
  def _policy(self) -> Callable[..., bool]:
    """The values that a layer saves for its backward pass."""
    if self.checkpoint_policy == 'SAVE_EVERYTHING':
      return lambda primitive, *_, **__: primitive.name not in _READS
    return jax_policy(self.checkpoint_policy)

  def _sow(
    self, sown: Mapping[str, PyTree], schedule: PipelineSchedule, tokens_I: jax.Array | None
  ) -> None:
    """Sows loss terms and summaries over all microbatches, combined as in task.Task.grads.

    Values of idle stages do not count. Loss terms and summaries are averaged with the microbatches'
    tokens as weights, as SownLosses weighs them, or the maximum of a summary is taken.
    """
    ticks = jnp.arange(schedule.ticks)[:, None]
    _, microbatch_tZ, works_tZ = schedule.work(ticks, jnp.arange(self.num_stages))
    tokens_tZ = works_tZ * (1 if tokens_I is None else tokens_I[microbatch_tZ])
    for collection, values in sown.items():
      for path, value in jax.tree_util.tree_leaves_with_path(values):
        # [ticks, l, Z]
        along = lambda x_tZ, ndim=value.ndim: x_tZ.reshape(
          x_tZ.shape[0], 1, x_tZ.shape[1], *(1,) * (ndim - 3)
        )
        works = along(works_tZ)
        name = '/'.join(k.key for k in path if hasattr(k, 'key'))
        if collection != LOSSES:
          name = name.rpartition('/')[2]
          if is_maximum(name):
            self.sow(collection, name, jnp.where(works, value, -jnp.inf).max(0))
            continue
        share = along(tokens_tZ / jnp.maximum(tokens_tZ.sum(0), 1e-6))
        mean = (jnp.where(works, value, 0) * share).sum(0)
        # over a stage's groups of layers too, whose loss terms add up
        self.sow(collection, name, self.num_repeats * mean if collection == LOSSES else mean)


class _State(NamedTuple):
  """The values that a tick passes to the next, [Z, Q, b, T, D] each unless stated otherwise."""

  before: jax.Array  # the rows of each stage before the first layer, [Z, Q, k, T, D]
  entering: jax.Array  # what is on its way to stage 0
  arriving: jax.Array  # what each stage has got from the stage before it
  # the microbatches between two groups of layers, [Z, I, Q, b, T, D]; None if a stage has one group
  waiting: jax.Array | None
  leaving: jax.Array  # what is on its way from the last stage
  after: jax.Array  # the rows of each stage after the last layer, [Z, Q, k, T, D]
  sums: list[list[jax.Array]]  # where gradients are added up, from StageWeights


def _barrier(*arrays: jax.Array) -> Sequence[jax.Array]:
  """Arrays that XLA uses only when all of them are there, and their gradients likewise."""
  return jax.lax.optimization_barrier(arrays)


_WAITING = ('layers', None, 'row_shards', 'batch', 'residual_length', 'act_embed')


class OneOfRepeated(nn.Module):
  """One layer of a RepeatedTransformer, which draws the same random numbers as it does there.

  Flax traces the body of a scan twice, and the number of a draw depends on it.
  """

  layer_tpl: Template  # the layer

  @nn.compact
  def __call__(self, x_BTD: jax.Array, *inputs: jax.Array | None) -> jax.Array:
    scan = nn.scan(
      lambda block, x, _: (block(x, *inputs), None),
      variable_axes=dict.fromkeys(['params', *FP8_COLLECTIONS, *SOWN], 0),
      split_rngs={'dropout': False},
      length=1,
    )
    return scan(self.layer_tpl(name=REPEATED), x_BTD, None)[0]


# operations that read a weight, whose results SAVE_EVERYTHING does not keep either
_READS = (
  'dynamic_slice', 'squeeze', 'reshape', 'broadcast_in_dim', 'concatenate', 'convert_element_type',
  'shard_map',
)  # fmt: skip


def _size(axes: tuple[str, ...]) -> int:
  active = active_mesh()
  return 1 if active is None else math.prod(active[0].shape[a] for a in axes)


def _inside(row_shards: tuple[str, ...]) -> contextlib.AbstractContextManager:
  """A context in which rows and weights are not split over `row_shards`, which are a dimension."""
  active = active_mesh()
  if active is None:
    return contextlib.nullcontext()
  mesh, rules = active
  others = [a for a in mesh.axis_names if a not in row_shards]
  return partitioning.activate(
    mesh, {**partitioning.rules_for(others, rules), 'row_shards': row_shards}
  )
