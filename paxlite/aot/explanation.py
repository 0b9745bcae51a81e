"""What is in the memory of a device in a step: the state, and what the forward pass keeps."""

import math

import jax
from jax.sharding import Mesh, NamedSharding

from paxlite.aot import analysis, saved_activations
from paxlite.aot.explanation_tables import short_name
from paxlite.aot.targets import Target
from paxlite.core.json_text import JsonObject
from paxlite.experiments.base import Experiment
from paxlite.optim.moments import is_moment
from paxlite.parallel import partitioning


def explain(experiment: Experiment, target: Target) -> JsonObject:
  """Compiles the train step of an experiment for a target, and explains it.

  Returns:
    An object for JSON. `report` is what `paxlite compile --json` writes. `totals` are bytes of one
    device: parameters, moments, other state, the batch, gradients, and saved activations of one
    microbatch. `activations` are the latter by origin, as `_activations` returns them. Those of a
    pipeline are in neither.

  Raises:
    UserError: The errors of analysis.compile_step.
  """
  e = experiment
  report = analysis.compile_step(e, target)
  mesh = e.mesh(target.topology())
  sharded = analysis.sharded_task(e, mesh)
  state, task, count = sharded.abstract, sharded.task, partitioning.bytes_per_device
  trained, _ = task.optimizer.split(state.params)
  moments = [x for x in jax.tree.leaves(state.opt_state) if is_moment(x)]
  totals = {
    'parameters': count(state.params),
    'moments': 0 if task.optimizer.on_host else count(moments),
    'other state': count(state) - count(state.params) - count(moments),
    'batch': count(analysis.abstract_batch(e, mesh, [])),
    'gradients': count(jax.tree.map(lambda w: w.update(dtype=task.gradient_dtype), trained)),
  }
  found: JsonObject = {'report': report.as_json(), 'totals': totals}
  if e.mesh_sizes.get('stage', 1) == 1:
    found['activations'] = _activations(e, mesh, e.batch_size // task.num_microbatches)
    totals['saved activations'] = sum(row['bytes'] for row in found['activations'])
  return found


def _activations(e: Experiment, mesh: Mesh, rows: int) -> list[JsonObject]:
  """Returns the arrays that the forward pass of so many rows keeps, by origin, most bytes first.

  `module` has made them, by the operation of JAX `made_by` or under this name of checkpoint
  policies. `bytes` are those of one device, of all `arrays` together.
  """
  found = dict[tuple[str, str], JsonObject]()
  for array in saved_activations.loss_of(e, mesh, rows).saved()[0]:
    partition = partitioning.spec(array.names, e.rules)
    partition = partitioning.fitting(partition, array.shape, dict(mesh.shape))
    shape = NamedSharding(mesh, partition).shard_shape(array.shape)
    origin = short_name(array.source or 'loss'), array.label or array.operation
    about = {'module': origin[0], 'made_by': origin[1], 'arrays': 0, 'bytes': 0}
    row = found.setdefault(origin, about)
    row['arrays'] += 1
    row['bytes'] += math.prod(shape) * jax.numpy.dtype(array.dtype).itemsize
  return sorted(found.values(), key=lambda row: -row['bytes'])
