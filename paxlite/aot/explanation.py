"""The arrays of a train step: its weights, and what is kept for the backward pass."""

import dataclasses
import math
from collections.abc import Iterator

import jax
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.aot import analysis, saved_activations
from paxlite.aot.saved_activations import Saved
from paxlite.aot.targets import Target
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.experiments.base import Experiment
from paxlite.optim.moments import is_moment
from paxlite.parallel import partitioning


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
  sharded = analysis.sharded_task(e, mesh)
  state, task, count = sharded.abstract, sharded.task, partitioning.bytes_per_device
  trained, _ = task.optimizer.split(state.params)
  on_host = lambda x: task.optimizer.on_host and is_moment(x)
  totals = {
    'parameters': count(state.params),
    'optimizer': count([x for x in jax.tree.leaves(state.opt_state) if not on_host(x)]),
    'other state': count(dataclasses.replace(state, params=(), opt_state=())),
    'batch': count(analysis.abstract_batch(e, mesh, [])),
    'gradients': count(jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trained)),
  }
  weights = [_row(weight, mesh, e) for weight in _weights(sharded.boxed_params)]
  found: JsonObject = {'report': report.as_json(), 'totals': totals, 'weights': weights}
  if e.mesh_sizes.get('stage', 1) == 1:
    rows = e.batch_size // task.num_microbatches
    saved, _ = saved_activations.loss_of(e, mesh, rows).saved()
    found['activations'] = [_row(s, mesh, e) for s in saved]
    totals['saved activations'] = sum(row['bytes'] for row in found['activations'])
  return found


def _weights(boxed: PyTree) -> Iterator[Saved]:
  is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)
  for path, leaf in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
    names = leaf.names if is_box(leaf) else (None,) * leaf.ndim
    value = meta.unbox(leaf)
    yield Saved(value.shape, str(value.dtype), '', path_name(path), names=names)


def _row(array: Saved, mesh: Mesh, e: Experiment) -> JsonObject:
  """Returns an array of the model on the mesh, for JSON.

  `name` is that of the variable, or the modules that make an activation; `shape` is that for all
  devices together; `axes` has the logical axis of each dimension, and `mesh_axes` those that split
  it. `bytes` are those of one device. An activation is `made_by` an operation of JAX, or is known
  to checkpoint policies by this name.
  """
  sizes, shape = dict(mesh.shape), array.shape
  partition = partitioning.fitting(partitioning.spec(array.names, e.rules), shape, sizes)
  split = [partitioning.axes_of(entry) for entry in partition]
  shards = math.prod(sizes[a] for axes in split for a in axes)
  return {
    'name': array.source or 'loss', 'shape': shape, 'dtype': array.dtype, 'axes': array.names,
    'mesh_axes': tuple(tuple(a for a in axes if sizes[a] > 1) for axes in split),
    'bytes': math.prod(shape) * jax.numpy.dtype(array.dtype).itemsize // shards,
    'made_by': array.label or array.operation,
  }  # fmt: skip
