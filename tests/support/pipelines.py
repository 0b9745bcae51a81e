"""python -m tests.support.pipelines CASE…: compares pipelines with one device.

A case is MODEL/MESH[/NAME=VALUE…]; a mesh is 'stage=2,data=4', and ROWS are those of the batch.
Prints one JSON line per case: the largest relative differences of the loss and of the gradients,
the trip counts of the program's loops, and its collectives.
"""

import json
import math
import sys
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from flax.linen import meta

from paxlite.aot.collectives import collectives
from paxlite.aot.hlo import Program
from paxlite.parallel import partitioning
from tests.support.meshes import MODELS, batch_of, compiled, largest

AXES = ('stage', 'replica', 'data', 'expert', 'context', 'mdl')


def experiment(model: str, mesh: dict[str, int], changes: dict[str, Any], rows: int) -> Any:
  cls, values = MODELS[model]
  axes = [a for a in AXES if a in mesh or a in ('replica', 'data', 'mdl')]
  shape = [mesh.get(a, 1) for a in axes]
  e = cls(
    **values
    | dict(MAX_SEQ_LEN=16, NUM_MICROBATCHES=4, PERCORE_BATCH_SIZE=rows / math.prod(shape))
    | dict(MESH_AXES=axes, ICI_MESH_SHAPE=shape)
    | changes
  )
  e.validate()
  return e


def gradients(e: Any, params: Any, fp8_state: Any, batch: Any, rng: Any) -> tuple[Any, str]:
  """Returns the gradients, what replaces FP8's state, and the metrics; and the program."""
  task, mesh = fdl.build(e.build_task()), e.mesh(jax.devices()[: e.num_devices])
  one = e.num_devices == 1

  def grads(params: Any, fp8_state: Any, batch: Any) -> Any:
    if one:
      return task.grads(params, batch, rng, fp8_state)
    with partitioning.activate(mesh, e.rules):
      return task.grads(params, batch, rng, fp8_state)

  if not one:
    boxed = jax.eval_shape(task.init_params, jax.random.key(0))
    shapes = partitioning.sharded_shapes(boxed, mesh, e.rules)
    params = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, shapes)
    batch = jax.device_put(batch, partitioning.batch_sharding(mesh, e.rules))
  program = compiled(jax.jit(grads), params, fp8_state, batch)
  return jax.device_get(program(params, fp8_state, batch)), program.as_text()


def check(name: str) -> dict[str, Any]:
  model, mesh, *words = name.split('/')
  changes = {}
  for word in words:
    key, _, value = word.partition('=')
    changes[key] = json.loads(value)
  sizes = {a: int(n) for a, n in (part.split('=') for part in mesh.split(','))}
  rows = changes.pop('ROWS', 16)
  e = experiment(model, sizes, changes, rows)
  alone = dict(changes)
  if changes.get('USE_FP8'):  # microbatches that are computed in turn have scales of their own
    alone['NUM_MICROBATCHES'] = 1
  one = experiment(model, {}, alone, rows)
  state = jax.jit(lambda rng: meta.unbox(fdl.build(one.build_task()).init(rng)))(jax.random.key(0))
  state = jax.device_get(state)
  rng = jax.random.key(7) if any('DROPOUT' in k for k in changes) else None
  batch = batch_of(one)
  (grads, after, metrics), text = gradients(e, state.params, state.fp8_state, batch, rng)
  (grads_1, after_1, metrics_1), _ = gradients(one, state.params, state.fp8_state, batch, rng)
  worst = jax.tree.map(difference, (grads, after), (grads_1, after_1))
  value, path = largest(worst)
  values = {k: difference(metrics[k].value, metrics_1[k].value) for k in metrics_1}
  found: dict[str, list[int]] = {}
  for c in collectives(Program(text), e.mesh_sizes):
    runs = found.setdefault(f'{c.kind} {"+".join(c.axes)}', [])
    runs.append(c.count)
  return {
    'case': name, 'loss': values['total_loss'], 'metrics': max(values.values()), 'gradient': value,
    'at': path, 'runs': {kind: sorted(set(runs)) for kind, runs in found.items()},
  }  # fmt: skip


def difference(a: Any, b: Any) -> float:
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return float(np.max(np.abs(a - b), initial=0) / (np.max(np.abs(b), initial=0) + 1e-30))


if __name__ == '__main__':
  for case in sys.argv[1:]:
    print(json.dumps(check(case)), flush=True)
