"""The parts of a train step: weights, saved activations, collectives, and what runs twice.

The weights come from the abstract state, the saved activations from the traced backward pass, and
the collectives and products from the compiled program.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax
from flax.linen import meta
from jax.sharding import Mesh, PartitionSpec

from paxlite.aot import analysis, collectives, saved_activations
from paxlite.aot.analysis import Report
from paxlite.aot.costs import Costs
from paxlite.aot.hlo import Program
from paxlite.aot.origins import RECOMPUTED, Origin, Paths, origins
from paxlite.aot.roofline import Links, speed_of
from paxlite.aot.schedule import StepSchedule
from paxlite.aot.step_blocks import Block, blocks_of
from paxlite.aot.targets import Target
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.experiments.base import Experiment
from paxlite.optim.moments import is_moment
from paxlite.parallel import partitioning
from paxlite.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class ArrayRow:
  """An array of the model on the mesh.

  Attributes:
    name: The name of the variable, or the modules that make the activation.
    shape: Its shape for all devices together.
    dtype: Its type, such as 'float32'.
    axes: The logical axis of each dimension; None where it has none.
    mesh_axes: The mesh axes that split each dimension.
    bytes: Bytes of one device.
    made_by: The JAX operation that makes an activation, or the name that a checkpoint policy knows
      it by; '' for weights.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  axes: tuple[str | None, ...]
  mesh_axes: tuple[tuple[str, ...], ...]
  bytes: int
  made_by: str = ''


@dataclasses.dataclass(frozen=True)
class BlockCollective:
  """The collectives of one kind along the same mesh axes, in one pass over one block, in a step.

  Attributes:
    blocks: The parts of the model; several where the compiler has merged their collectives.
    passes: The passes that they belong to, of forward, recomputed, backward and update.
    kind: One of collectives.KINDS.
    axes: Mesh axes along which devices communicate.
    runs: Number of runs in a step.
    bytes: Bytes of the arrays, of all runs together.
    near_bytes: Bytes that a device sends within its slice or host.
    far_bytes: Bytes that it sends to other slices or hosts.
    asynchronous_runs: Runs that start in one instruction and end in another.
    seconds: Seconds at the speeds of the data sheet; None where the chip is not known.
    exposed: The part of `seconds` that no kernel of the schedule hides.
  """

  blocks: tuple[str, ...]
  passes: tuple[str, ...]
  kind: str
  axes: tuple[str, ...]
  runs: int
  bytes: int
  near_bytes: float
  far_bytes: float
  asynchronous_runs: int
  seconds: float | None
  exposed: float | None


@dataclasses.dataclass(frozen=True)
class Products:
  """The matrix products of a module in one pass of a step, on one device.

  Attributes:
    block: The part of the model.
    module: The module in it, such as 'qkv/query'.
    of: One of forward, recomputed, backward and update.
    runs: Number of kernels that run.
    flops: FLOPs of all runs.
  """

  block: str
  module: str
  of: str
  runs: int
  flops: float


@dataclasses.dataclass(frozen=True)
class Totals:
  """Bytes of one device.

  Attributes:
    parameters: All parameters.
    optimizer: The optimizer's state.
    others: Counters, and the statistics of FP8.
    batch: The arrays of a batch.
    gradients: The gradients of the trainable parameters.
    activations: The saved activations of one microbatch.
    temporaries: What the compiler allocates beside its arguments, gradients and activations
      included; 0 where the program did not compile.
    code: The compiled program itself.
    peak: The most bytes in use at a time.
    memory: The bytes of a device that programs can use; None where that is not known.
  """

  parameters: int
  optimizer: int
  others: int
  batch: int
  gradients: int
  activations: int
  temporaries: int
  code: int
  peak: int
  memory: int | None

  @property
  def state(self) -> int:
    return self.parameters + self.optimizer + self.others


@dataclasses.dataclass(frozen=True)
class Explanation:
  """The parts of a train step.

  Attributes:
    report: What `paxlite compile` says of the step.
    weights: One row for each parameter.
    activations: One row for each array that the forward pass keeps for the backward pass.
    collectives: Collectives by block and pass.
    products: Matrix products by module and pass.
    totals: Bytes of one device.
    blocks: FLOPs, traffic and foreseen seconds of each block of a step, by its name.
  """

  report: Report
  weights: tuple[ArrayRow, ...]
  activations: tuple[ArrayRow, ...]
  collectives: tuple[BlockCollective, ...]
  products: tuple[Products, ...]
  totals: Totals
  blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict)

  @property
  def recomputed(self) -> tuple[Products, ...]:
    """The products of the forward pass that the backward pass computes again."""
    return tuple(p for p in self.products if p.of == RECOMPUTED)

  def as_json(self) -> JsonObject:
    """Returns the explanation; `report` is what `paxlite compile --json` writes."""
    rows = lambda found: [dataclasses.asdict(row) for row in found]
    return {
      'report': self.report.as_json(),
      'totals': dataclasses.asdict(self.totals) | {'state': self.totals.state},
      'weights': rows(self.weights),
      'activations': rows(self.activations),
      'collectives': rows(self.collectives),
      'products': rows(self.products),
      'blocks': {name: dataclasses.asdict(block) for name, block in self.blocks.items()},
    }


def explain(experiment: Experiment, target: Target) -> Explanation:
  """Compiles the train step of an experiment for a target, and explains it.

  Raises:
    UserError: The errors of analysis.compile_step.
  """
  e = experiment
  report = analysis.compile_step(e, target)
  mesh = e.mesh(target.topology())
  task = fdl.build(e.build_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  abstract = partitioning.sharded_shapes(boxed, mesh, e.rules)
  trainable, _ = task.optimizer.split(abstract.params)
  gradients = jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trainable)
  on_host = lambda x: task.optimizer.on_host and is_moment(x)
  optimizer = [x for x in jax.tree.leaves(abstract.opt_state) if not on_host(x)]
  rows = e.batch_size // task.num_microbatches
  activations = [
    _row(s.source or 'loss', s.shape, s.dtype, s.names, mesh, e, s.label or s.operation)
    for s in saved_activations.saved_by_loss(e, mesh, rows)
  ]
  found: tuple[BlockCollective, ...] = ()
  products: tuple[Products, ...] = ()
  blocks: dict[str, Block] = {}
  if report.program:
    program = Program(report.program)
    costs = Costs(program, analysis.platform_of(mesh.devices.flat[0]))
    paths = Paths(program)
    links = analysis.links_of(e, mesh)
    found = tuple(_collectives(program, costs, paths, links, report))
    products = tuple(_products(costs, paths))
    speed = None if report.chip is None else speed_of(report.chip, links)
    blocks = blocks_of(costs, links.sizes, speed)
  chip = report.chip
  totals = Totals(
    parameters=_bytes(abstract.params),
    optimizer=_bytes(optimizer),
    others=_bytes(abstract.replace(params=(), opt_state=())),
    batch=_bytes(analysis.abstract_batch(e, mesh, [])),
    gradients=_bytes(gradients),
    activations=sum(row.bytes for row in activations),
    temporaries=report.temporaries,
    code=report.generated_code,
    peak=report.total,
    memory=None if chip is None else chip.memory,
  )
  weights = tuple(_weights(boxed, mesh, e))
  return Explanation(report, weights, tuple(activations), found, products, totals, blocks)


def _weights(boxed: TrainState, mesh: Mesh, e: Experiment) -> Iterator[ArrayRow]:
  is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)
  for path, leaf in jax.tree_util.tree_leaves_with_path(boxed.params, is_leaf=is_box):
    names = leaf.names if is_box(leaf) else (None,) * leaf.ndim
    value = meta.unbox(leaf)
    yield _row(path_name(path), value.shape, str(value.dtype), names, mesh, e)


def _row(
  name: str,
  shape: Sequence[int],
  dtype: str,
  axes: Sequence[str | None],
  mesh: Mesh,
  e: Experiment,
  made_by: str = '',
) -> ArrayRow:
  sizes = dict(mesh.shape)
  partition = partitioning.fitting(partitioning.spec(axes, e.rules), shape, sizes)
  mesh_axes = tuple(
    tuple(a for a in partitioning.axes_of(entry) if sizes[a] > 1) for entry in partition
  )
  shape = tuple(shape)
  size = _device_bytes(shape, dtype, partition, sizes)
  return ArrayRow(name, shape, dtype, tuple(axes), mesh_axes, size, made_by)


def _device_bytes(
  shape: Sequence[int], dtype: str, partition: PartitionSpec, sizes: Mapping[str, int]
) -> int:
  shards = math.prod(sizes[a] for entry in partition for a in partitioning.axes_of(entry))
  return math.prod(shape) * jax.numpy.dtype(dtype).itemsize // shards


def _bytes(tree: PyTree) -> int:
  """Returns the bytes of abstract arrays on one device."""

  def one(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def _collectives(
  program: Program, costs: Costs, paths: Paths, links: Links, report: Report
) -> Iterator[BlockCollective]:
  """Yields the collectives by block and pass, the most sent first."""
  speed = None if report.chip is None else speed_of(report.chip, links)
  waits: dict[str, float] = {}
  if speed is not None:
    waits = StepSchedule(costs, speed, links.sizes).timeline(program.entry).exposed_by
  groups: dict[tuple[object, ...], list[BlockCollective]] = collections.defaultdict(list)
  for one in collectives.collectives(program, links.sizes):
    computation = program.computations[one.computation]
    instruction = computation.get(one.instruction)
    path = paths.path(computation, instruction)
    parts = origins(path) if path else (Origin('elsewhere', '', 'elsewhere'),)
    near, far = links.split(one.axes, one.sent_bytes)
    starts = instruction.opcode.endswith('-start') or 'async_collective' in instruction.attributes
    row = BlockCollective(
      blocks=tuple(dict.fromkeys(p.block for p in parts)),
      passes=tuple(dict.fromkeys(p.of for p in parts)),
      kind=one.kind,
      axes=one.axes,
      runs=one.count,
      bytes=one.bytes * one.count,
      near_bytes=near,
      far_bytes=far,
      asynchronous_runs=one.count if starts else 0,
      seconds=None
      if speed is None
      else sum(speed.links(dataclasses.replace(one, count=1))) * one.count,
      # Copies of an instruction share a channel. The time spent waiting for it is counted once.
      exposed=None
      if speed is None
      else waits.pop(one.instruction, 0.0) + waits.pop(f'channel {one.channel}', 0.0),
    )
    groups[row.blocks, row.passes, row.kind, row.axes].append(row)
  merged = [added(rows) for rows in groups.values()]
  yield from sorted(merged, key=lambda row: -(row.near_bytes + row.far_bytes))


def added(rows: Sequence[BlockCollective]) -> BlockCollective:
  """Returns collectives of one kind and the same axes as one, with the blocks and passes of all."""
  names = ['runs', 'bytes', 'near_bytes', 'far_bytes', 'asynchronous_runs']
  if rows[0].seconds is not None:
    names += ['seconds', 'exposed']
  # Any, because dataclasses.replace is declared with one type for each field.
  values: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in names}
  for name in ('blocks', 'passes'):
    values[name] = tuple(dict.fromkeys(part for row in rows for part in getattr(row, name)))
  return dataclasses.replace(rows[0], **values)


def _products(costs: Costs, paths: Paths) -> Iterator[Products]:
  groups: dict[Origin, list[float]] = collections.defaultdict(lambda: [0, 0.0])
  for kernel, count in costs.kernels():
    if flops := sum(kernel.flops.values()):
      path = paths.path(kernel.computation, kernel.instruction)
      parts = origins(path) if path else (Origin('elsewhere', '', 'elsewhere'),)
      groups[parts[0]][0] += count
      groups[parts[0]][1] += count * flops
  for origin, (runs, flops) in sorted(groups.items()):
    yield Products(origin.block, origin.module, origin.of, int(runs), flops)
