"""A repeated stack as a pipeline, in which each stage of the mesh holds a part of the layers."""

import contextlib
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import LazyRng

from paxlite.core.templates import Template
from paxlite.core.trees import PyTree
from paxlite.layers.einsum import FP8_COLLECTIONS
from paxlite.layers.layer_facts import LayerFacts, layer_facts
from paxlite.layers.pipeline_schedule import Schedule
from paxlite.layers.remat import jax_policy
from paxlite.layers.sown import LOSSES, SOWN, is_maximum
from paxlite.layers.stage_rows import WAITING, StageRows
from paxlite.layers.stage_weights import StageWeights
from paxlite.layers.transformer import REPEATED, RepeatedTransformer
from paxlite.parallel import partitioning
from paxlite.parallel.partitioning import active_mesh, axes_of, shard


class PipelinedTransformer(RepeatedTransformer):
  """A RepeatedTransformer whose stages of layers work on different microbatches at the same time.

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

  Attributes:
    num_stages: Z, the size of the mesh axis 'stage'.
    num_microbatches: I. If it does not divide the rows of a batch, the batch is not split.
    num_repeats: R, the number of groups of layers in a stage.
    gathers_once: Whether weights are gathered over data once a step, instead of once a tick.
  """

  num_stages: int = 1
  num_microbatches: int = 1
  num_repeats: int = 1
  gathers_once: bool = True

  @property
  def microbatches(self) -> int:
    return self.num_microbatches

  def layers(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    # text is generated token by token, for which the pipeline is not used
    if self.is_initializing() or self.is_mutable_collection('cache'):
      return super().layers(x_BTD, positions_BT, segment_ids_BT)
    B, T, D = x_BTD.shape
    I = self.num_microbatches if B % self.num_microbatches == 0 else 1
    beside = [
      None if a is None else jnp.broadcast_to(a, (B, T)) for a in (positions_BT, segment_ids_BT)
    ]
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
      rows = StageRows(self.num_stages, I, _size(row_shards))
      positions, segment_ids = (None if a is None else rows.split(a) for a in beside)
      schedule = Schedule(self.num_stages, I, self.num_repeats)
      run = self._applied(rng, row_shards)
      keys = None
      if facts.draws and rng is not None:
        keys = lambda i, layer: jax.random.split(
          rng.rng if I == 1 else jax.random.fold_in(rng.rng, i), self.num_layers
        )[layer]
      waiting = rows.enter(x_BTD)
      done, sown = self._ticks(schedule, weights, run, waiting, (positions, segment_ids), keys)
      y_BTD = rows.leave(done)
    self._sow(sown, schedule, None if segment_ids is None else (segment_ids > 0).sum((1, 2, 3)))
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
    schedule: Schedule,
    weights: StageWeights,
    run: Callable[..., tuple[jax.Array, PyTree]],
    waiting_ZIQbTD: jax.Array,
    beside: tuple[jax.Array | None, jax.Array | None],
    keys: Callable[[jax.Array, jax.Array], jax.Array] | None,
  ) -> tuple[jax.Array, PyTree]:
    """Runs all ticks.

    Args:
      schedule: The schedule.
      weights: The variables of the stages.
      run: A layer, from `_applied`.
      waiting_ZIQbTD: The microbatches, at stage 0.
      beside: Positions and segment ids, [I, Q, b, T].
      keys: Returns the key of a microbatch and a layer; None if layers draw nothing.

    Returns:
      The microbatches after the last layer, and what layers sow, [ticks, l, Z, …].
    """
    Z, l = self.num_stages, self.num_layers // (self.num_stages * self.num_repeats)
    stages = jnp.arange(Z)
    on_stages = lambda x: shard(x, 'layers', 'row_shards', 'batch', 'residual_length', 'act_embed')
    # stages are selected by a mask, because slicing a sharded dimension would gather it
    is_first = (stages == 0).reshape(Z, 1, 1, 1, 1)

    active = active_mesh()

    def roll(x_ZQbTD: jax.Array, by: int) -> jax.Array:
      # a derivative is traced later, where other axes are active
      with contextlib.nullcontext() if active is None else partitioning.activate(*active):
        return on_stages(jnp.roll(on_stages(x_ZQbTD), by, axis=0))

    # JAX's own derivative is a sum of two arrays, and XLA sends both
    send = jax.custom_vjp(lambda x_ZQbTD: roll(x_ZQbTD, 1))
    send.defvjp(lambda x_ZQbTD: (send(x_ZQbTD), None), lambda _, grad: (roll(grad, -1),))

    def tick(
      carry: tuple[jax.Array, jax.Array, list[jax.Array]], t: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, list[jax.Array]], PyTree]:
      waiting_ZIQbTD, left_ZQbTD, sums = carry
      arriving_ZQbTD = send(left_ZQbTD)
      waiting_ZIQbTD, entering_ZQbTD = schedule.exchange(waiting_ZIQbTD, arriving_ZQbTD, t)
      waiting_ZIQbTD = shard(waiting_ZIQbTD, *WAITING)
      held_ZQbTD = on_stages(jnp.where(is_first, entering_ZQbTD, arriving_ZQbTD))
      repeat_Z, microbatch_Z, works_Z = schedule.work(t, stages)
      inputs = [
        None if a is None else shard(a[microbatch_Z], 'layers', 'row_shards', 'batch', 'length')
        for a in beside
      ]

      def layer(
        carry: tuple[jax.Array, list[jax.Array]], j: jax.Array
      ) -> tuple[tuple[jax.Array, list[jax.Array]], PyTree]:
        x_ZQbTD, sums = carry
        variables, sums = weights.layer(sums, repeat_Z * l + j, works_Z)
        keys_Z = None
        if keys is not None:
          keys_Z = jax.vmap(keys)(microbatch_Z, (repeat_Z * Z + stages) * l + j)
        y_ZQbTD, sown = run(variables, x_ZQbTD, *inputs, keys_Z)
        return (on_stages(y_ZQbTD), sums), sown

      # a weight is never kept for the backward pass, which reads it again
      layer = jax.checkpoint(layer, policy=self._policy, prevent_cse=False)
      (left_ZQbTD, sums), sown = jax.lax.scan(layer, (held_ZQbTD, sums), jnp.arange(l))
      return (waiting_ZIQbTD, left_ZQbTD, sums), sown

    nothing_ZQbTD = jnp.zeros_like(waiting_ZIQbTD[:, 0])
    carry = waiting_ZIQbTD, nothing_ZQbTD, weights.sums
    ticks = jnp.arange(schedule.ticks)
    (waiting_ZIQbTD, left_ZQbTD, _), sown = jax.lax.scan(tick, carry, ticks)
    arriving_ZQbTD = send(left_ZQbTD)
    done_ZIQbTD, _ = schedule.exchange(waiting_ZIQbTD, arriving_ZQbTD, jnp.array(schedule.ticks))
    return done_ZIQbTD, sown

  @property
  def _policy(self) -> Callable[..., bool]:
    """What a layer keeps for its backward pass."""
    if self.checkpoint_policy == 'SAVE_EVERYTHING':
      return lambda primitive, *_, **__: primitive.name not in _READS
    return jax_policy(self.checkpoint_policy)

  def _sow(
    self, sown: Mapping[str, PyTree], schedule: Schedule, tokens_I: jax.Array | None
  ) -> None:
    """Sows loss terms and summaries over all microbatches, combined as in task.Task.grads.

    Values of idle stages do not count. Loss terms are averaged over the microbatches. Summaries are
    averaged with the microbatches' tokens as weights, or their maximum is taken.
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
        short = name.rpartition('/')[2]
        if collection == LOSSES:
          total = jnp.where(works, value, 0).sum(0)
          self.sow(collection, name, total / schedule.microbatches)
        elif is_maximum(short):
          self.sow(collection, short, jnp.where(works, value, -jnp.inf).max(0))
        else:
          share = along(tokens_tZ / jnp.maximum(tokens_tZ.sum(0), 1e-6))
          self.sow(collection, short, (jnp.where(works, value, 0) * share).sum(0))


class OneOfRepeated(nn.Module):
  """One layer of a RepeatedTransformer, which draws the same random numbers as it does there.

  Flax traces the body of a scan twice, and the number of a draw depends on it.

  Attributes:
    layer_tpl: The layer.
  """

  layer_tpl: Template

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
