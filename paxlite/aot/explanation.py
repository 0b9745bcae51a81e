"""The parts of a train step: weights, saved activations, collectives, and what runs twice.

The weights come from the abstract state, the saved activations from the traced backward pass, and
the collectives and products from the compiled program.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import fiddle as fdl
import jax
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.aot import analysis, collectives, saved_activations
from paxlite.aot.costs import Costs
from paxlite.aot.hlo import Program
from paxlite.aot.origins import Origin, Paths
from paxlite.aot.roofline import Links, speed_of
from paxlite.aot.schedule import Speed, StepSchedule
from paxlite.aot.step_blocks import blocks_of
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
  """An array of the model on the mesh."""

  name: str  # of the variable, or the modules that make the activation
  shape: tuple[int, ...]  # for all devices together
  dtype: str
  axes: tuple[str | None, ...]  # the logical axis of each dimension
  mesh_axes: tuple[tuple[str, ...], ...]  # that split each dimension
  bytes: int  # of one device
  made_by: str = ''  # the JAX operation of an activation, or its name in checkpoint policies


@dataclasses.dataclass(frozen=True)
class BlockCollective:
  """The collectives of one kind along the same mesh axes, in one pass over one block, in a step.

  There are several blocks and passes where the compiler has merged their collectives.
  """

  blocks: tuple[str, ...]
  passes: tuple[str, ...]
  kind: str  # one of collectives.KINDS
  axes: tuple[str, ...]
  runs: int
  bytes: int  # of the arrays, of all runs together
  near_bytes: float  # that a device sends within its slice or host
  far_bytes: float  # that it sends to others
  asynchronous_runs: int  # that start in one instruction and end in another
  seconds: float | None  # at the speeds of the data sheet, if the chip is known
  exposed: float | None  # the part of `seconds` that no kernel of the schedule hides


def explain(experiment: Experiment, target: Target) -> JsonObject:
  """Compiles the train step of an experiment for a target, and explains it.

  Returns:
    An object for JSON. `report` is what `paxlite compile --json` writes. `weights` and
    `activations` have an ArrayRow for each parameter, and for each array that the forward pass
    keeps for the backward pass; `collectives` a BlockCollective by block, pass, kind and axes;
    `products` the runs and FLOPs of matrix products by block, module and pass; `blocks` what
    step_blocks.blocks_of returns. `totals` are bytes of one device: parameters, optimizer, others
    (counters, statistics of FP8), state (these three), batch, gradients, activations (of one
    microbatch), temporaries (what the compiler allocates beside its arguments), code, peak, and
    memory (of the chip; None where that is not known).

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
  on_host = lambda x: task.optimizer.on_host and is_moment(x)
  rows = e.batch_size // task.num_microbatches
  activations = [
    _row(s.source or 'loss', s.shape, s.dtype, s.names, mesh, e, s.label or s.operation)
    for s in saved_activations.saved_by_loss(e, mesh, rows)
  ]
  state = {
    'parameters': _bytes(abstract.params),
    'optimizer': _bytes([x for x in jax.tree.leaves(abstract.opt_state) if not on_host(x)]),
    'others': _bytes(abstract.replace(params=(), opt_state=())),
  }
  found: JsonObject = {
    'report': report.as_json(),
    'totals': state | {
      'state': sum(state.values()),
      'batch': _bytes(analysis.abstract_batch(e, mesh, [])),
      'gradients': _bytes(jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trainable)),
      'activations': sum(row.bytes for row in activations),
      'temporaries': report.temporaries,
      'code': report.generated_code,
      'peak': report.total,
      'memory': None if report.chip is None else report.chip.memory,
    },
    'weights': [dataclasses.asdict(row) for row in _weights(boxed, mesh, e)],
    'activations': [dataclasses.asdict(row) for row in activations],
    'collectives': [], 'products': [], 'blocks': {},
  }  # fmt: skip
  if report.program:
    costs = Costs(Program(report.program), analysis.platform_of(mesh.devices.flat[0]))
    paths, links = Paths(costs.program), analysis.links_of(e, mesh)
    speed = None if report.chip is None else speed_of(report.chip, links)
    blocks = blocks_of(costs, links.sizes, speed)
    found |= {
      'collectives': [dataclasses.asdict(c) for c in _collectives(costs, paths, links, speed)],
      'products': list(_products(costs, paths)),
      'blocks': {name: dataclasses.asdict(block) for name, block in blocks.items()},
    }
  return found


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
  split = [partitioning.axes_of(entry) for entry in partition]
  shards = math.prod(sizes[a] for axes in split for a in axes)
  size = math.prod(shape) * jax.numpy.dtype(dtype).itemsize // shards
  mesh_axes = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in split)
  return ArrayRow(name, tuple(shape), dtype, tuple(axes), mesh_axes, size, made_by)


def _bytes(tree: PyTree) -> int:
  """Returns the bytes of abstract arrays on one device."""

  def one(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def _collectives(
  costs: Costs, paths: Paths, links: Links, speed: Speed | None
) -> list[BlockCollective]:
  """Returns the collectives by block and pass, the most sent first."""
  program = costs.program
  waits: dict[str, float] = {}
  if speed is not None:
    waits = StepSchedule(costs, speed, links.sizes).timeline(program.entry).exposed_by
  groups: dict[tuple[object, ...], list[BlockCollective]] = collections.defaultdict(list)
  for one in collectives.collectives(program, links.sizes):
    computation = program.computations[one.computation]
    instruction = computation.get(one.instruction)
    parts = paths.origins(computation, instruction)
    near, far = links.split(one.axes, one.sent_bytes)
    starts = instruction.opcode.endswith('-start') or 'async_collective' in instruction.attributes
    seconds = exposed = None
    if speed is not None:
      seconds = sum(speed.links(dataclasses.replace(one, count=1))) * one.count
      # Copies of an instruction share a channel. The time spent waiting for it is counted once.
      exposed = waits.pop(one.instruction, 0.0) + waits.pop(f'channel {one.channel}', 0.0)
    row = BlockCollective(
      tuple(dict.fromkeys(p.block for p in parts)), tuple(dict.fromkeys(p.of for p in parts)),
      one.kind, one.axes, one.count, one.bytes * one.count, near, far, one.count * starts, seconds,
      exposed,
    )  # fmt: skip
    groups[row.blocks, row.passes, row.kind, row.axes].append(row)
  return sorted(map(_added, groups.values()), key=lambda row: -(row.near_bytes + row.far_bytes))


def _added(rows: Sequence[BlockCollective]) -> BlockCollective:
  names = ['runs', 'bytes', 'near_bytes', 'far_bytes', 'asynchronous_runs']
  if rows[0].seconds is not None:
    names += ['seconds', 'exposed']
  # Any, because dataclasses.replace is declared with one type for each field.
  sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in names}
  return dataclasses.replace(rows[0], **sums)


def _products(costs: Costs, paths: Paths) -> Iterator[JsonObject]:
  groups: dict[Origin, list[float]] = collections.defaultdict(lambda: [0, 0.0])
  for kernel, count in costs.kernels():
    if flops := sum(kernel.flops.values()):
      origin = paths.origins(kernel.computation, kernel.instruction)[0]
      groups[origin][0] += count
      groups[origin][1] += count * flops
  for origin, (runs, flops) in sorted(groups.items()):
    yield dataclasses.asdict(origin) | {'runs': int(runs), 'flops': flops}
