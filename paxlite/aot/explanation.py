"""The arrays of a train step: its weights, and what is kept for the backward pass."""

import math
from collections.abc import Iterator, Sequence

import fiddle as fdl
import jax
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.aot import analysis, saved_activations
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
    pass keeps for the backward pass; there are no `activations` of a pipeline. `totals` are bytes
    of one device: the state, the batch, gradients, and saved activations of one microbatch.

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
  found: JsonObject = {
    'report': report.as_json(), 'weights': list(_weights(boxed, mesh, e)),
    'totals': {
      'parameters': count(abstract.params),
      'optimizer': count([x for x in jax.tree.leaves(abstract.opt_state) if not on_host(x)]),
      'other state': count(abstract.replace(params=(), opt_state=())),
      'batch': count(analysis.abstract_batch(e, mesh, [])),
      'gradients': count(jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trainable)),
    },
  }  # fmt: skip
  if e.mesh_sizes.get('stage', 1) == 1:
    found['activations'] = [
      _row(s.source or 'loss', s.shape, s.dtype, s.names, mesh, e, s.label or s.operation)
      for s in saved_activations.loss_of(e, mesh, rows).saved()[0]
    ]
    found['totals']['saved activations'] = sum(row['bytes'] for row in found['activations'])
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
