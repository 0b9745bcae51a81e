"""The parts of a train step: weights, saved activations, collectives, and what runs twice.

The weights come from the abstract state, the saved activations from the traced backward pass, and
the collectives and products from the compiled program.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import fiddle as fdl
import jax
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.aot import analysis, collectives, saved_activations
from paxlite.aot.origins import Origin
from paxlite.aot.roofline import StepProgram
from paxlite.aot.step_blocks import blocks_of
from paxlite.aot.targets import Target
from paxlite.core.json_text import JsonObject
from paxlite.core.variable_names import path_name
from paxlite.experiments.base import Experiment
from paxlite.optim.moments import is_moment
from paxlite.parallel import partitioning
from paxlite.training.train_state import TrainState


def explain(experiment: Experiment, target: Target) -> JsonObject:
  """Compiles the train step of an experiment for a target, and explains it.

  Returns:
    An object for JSON. `report` is what `paxlite compile --json` writes. `weights` and
    `activations` have what `_row` returns for each parameter, and for each array that the forward
    pass keeps for the backward pass; `collectives` what `_collectives` returns; `products` the runs
    and FLOPs of matrix products by block, module and pass; `blocks` what step_blocks.blocks_of
    returns. `totals` are bytes of one device: parameters, optimizer, others (counters, statistics
    of FP8), state (these three), batch, gradients, activations (of one microbatch), temporaries
    (what the compiler allocates beside its arguments), code, peak, and memory (of the chip; None
    where that is not known).

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
  rows, count = e.batch_size // task.num_microbatches, partitioning.bytes_per_device
  activations = [
    _row(s.source or 'loss', s.shape, s.dtype, s.names, mesh, e, s.label or s.operation)
    for s in saved_activations.loss_of(e, mesh, rows).saved()[0]
  ]
  state = {
    'parameters': count(abstract.params),
    'optimizer': count([x for x in jax.tree.leaves(abstract.opt_state) if not on_host(x)]),
    'others': count(abstract.replace(params=(), opt_state=())),
  }
  found: JsonObject = {
    'report': report.as_json(),
    'totals': state | {
      'state': sum(state.values()),
      'batch': count(analysis.abstract_batch(e, mesh, [])),
      'gradients': count(jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trainable)),
      'activations': sum(row['bytes'] for row in activations),
      'temporaries': report.temporaries,
      'code': report.generated_code,
      'peak': report.total,
      'memory': None if report.chip is None else report.chip.memory,
    },
    'weights': list(_weights(boxed, mesh, e)), 'activations': activations,
    'collectives': [], 'products': [], 'blocks': {},
  }  # fmt: skip
  if report.program:
    platform = analysis.platform_of(mesh.devices.flat[0])
    step = StepProgram(report.program, platform, analysis.links_of(e, mesh), report.chip)
    found |= {
      'collectives': _collectives(step), 'products': list(_products(step)),
      'blocks': blocks_of(step),
    }  # fmt: skip
  return found


def _weights(boxed: TrainState, mesh: Mesh, e: Experiment) -> Iterator[JsonObject]:
  is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)
  for path, leaf in jax.tree_util.tree_leaves_with_path(boxed.params, is_leaf=is_box):
    names = leaf.names if is_box(leaf) else (None,) * leaf.ndim
    value = meta.unbox(leaf)
    yield _row(path_name(path), value.shape, str(value.dtype), names, mesh, e)


def _row(
  name: str, shape: Sequence[int], dtype: str, axes: Sequence[str | None], mesh: Mesh,
  e: Experiment, made_by: str = '',
) -> JsonObject:  # fmt: skip
  """Returns an array of the model on the mesh, for JSON.

  `name` is that of the variable, or the modules that make an activation; `shape` is that for all
  devices together; `axes` has the logical axis of each dimension, and `mesh_axes` those that split
  it. `bytes` are those of one device. An activation is `made_by` an operation of JAX, or is known
  to checkpoint policies by this name.
  """
  sizes = dict(mesh.shape)
  partition = partitioning.fitting(partitioning.spec(axes, e.rules), shape, sizes)
  split = [partitioning.axes_of(entry) for entry in partition]
  shards = math.prod(sizes[a] for axes in split for a in axes)
  return {
    'name': name, 'shape': tuple(shape), 'dtype': dtype, 'axes': tuple(axes),
    'mesh_axes': tuple(tuple(a for a in axes if sizes[a] > 1) for axes in split),
    'bytes': math.prod(shape) * jax.numpy.dtype(dtype).itemsize // shards, 'made_by': made_by,
  }  # fmt: skip


def _collectives(step: StepProgram) -> list[JsonObject]:
  """Returns the collectives of a step by block, pass, kind and axes, the most sent first.

  `blocks` and `passes` are several where the compiler has merged their collectives. `bytes` are
  those of the arrays, of all `runs` together; a device sends `near_bytes` within its slice or host
  and `far_bytes` to others. `asynchronous_runs` start in one instruction and end in another. At the
  speeds of the chip they take `seconds`, of which no kernel hides `exposed`; None: it is not known.
  """
  program, links, speed = step.costs.program, step.links, step.speed
  waits = {} if speed is None else step.timeline(speed).exposed_by
  found = dict[tuple[object, ...], JsonObject]()
  for one in collectives.collectives(program, links.sizes):
    computation = program.computations[one.computation]
    instruction = computation.get(one.instruction)
    near, far = links.split(one.axes, one.sent_bytes)
    starts = instruction.opcode.endswith('-start') or 'async_collective' in instruction.attributes
    sums: dict[str, float] = dict(
      runs=one.count, bytes=one.bytes * one.count, near_bytes=near, far_bytes=far,
      asynchronous_runs=one.count * starts,
    )  # fmt: skip
    if speed is not None:
      sums['seconds'] = sum(speed.links(dataclasses.replace(one, count=1))) * one.count
      # Copies of an instruction share a channel. The time spent waiting for it is counted once.
      channel = waits.pop(f'channel {one.channel}', 0.0)
      sums['exposed'] = waits.pop(one.instruction, 0.0) + channel
    parts = step.paths.origins(computation, instruction)
    about: JsonObject = dict(
      blocks=tuple(dict.fromkeys(p.block for p in parts)),
      passes=tuple(dict.fromkeys(p.of for p in parts)), kind=one.kind, axes=one.axes,
    )  # fmt: skip
    unknown = {'seconds': None, 'exposed': None}
    row = found.setdefault(tuple(about.values()), about | unknown | dict.fromkeys(sums, 0))
    row |= {name: row[name] + n for name, n in sums.items()}
  return sorted(found.values(), key=lambda row: -(row['near_bytes'] + row['far_bytes']))


def _products(step: StepProgram) -> Iterator[JsonObject]:
  groups: dict[Origin, list[float]] = collections.defaultdict(lambda: [0, 0.0])
  for kernel, count in step.costs.kernels():
    if flops := sum(kernel.flops.values()):
      origin = step.paths.origins(kernel.computation, kernel.instruction)[0]
      groups[origin][0] += count
      groups[origin][1] += count * flops
  for origin, (runs, flops) in sorted(groups.items()):
    yield dataclasses.asdict(origin) | {'runs': int(runs), 'flops': flops}
