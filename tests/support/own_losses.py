"""Compares losses of one's own on eight devices with one device: the loss and all gradients.

python -m tests.support.own_losses MODULE.CLASS … prints a line of JSON for each class, mesh and
number of microbatches: the largest differences from one device without microbatches, relative to
the largest value.
"""

import dataclasses
import importlib
import json
import sys
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from flax.linen import meta

from paxlite.parallel import partitioning
from tests.support.mesh_grid import difference

SMALL = dict(NUM_LAYERS=1, MODEL_DIMS=16, MAX_SEQ_LEN=8)
MESHES = [1, 8, 1], [2, 2, 2]
ROWS = 16


def drawn(task: Any, e: Any) -> tuple[Any, Any]:
  """Returns parameters, and a batch in which half of the targets have no weight."""
  rng = np.random.default_rng(0)
  shapes = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)).params)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype('float32') / 4, shapes)
  ids = rng.integers(0, e.VOCAB_SIZE, (ROWS, e.MAX_SEQ_LEN + 1)).astype('int32')
  weights = (rng.random((ROWS, e.MAX_SEQ_LEN)) < 0.5).astype('float32')
  return params, {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def found(e: Any, n: int, devices: list[Any] | None) -> tuple[Any, Any]:
  """Returns the gradients and the loss of n microbatches, on the experiment's mesh."""
  mesh = e.mesh(devices)
  task = dataclasses.replace(fdl.build(e.build_task()), num_microbatches=n)
  params, batch = drawn(task, e)
  boxed = jax.eval_shape(task.init, jax.random.key(0)).params
  shapes = partitioning.sharded_shapes(boxed, mesh, e.rules)
  params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, shapes)
  batch = jax.device_put(batch, partitioning.batch_sharding(mesh, e.rules))

  @jax.jit
  def grads(params: Any, batch: Any) -> Any:
    with partitioning.activate(mesh, e.rules):
      grads, _, metrics = task.grads(params, batch, None)
      return grads, metrics['total_loss'].value

  return jax.device_get(grads(params, batch))


def main(names: list[str]) -> None:
  for name in names:
    module, _, cls = name.rpartition('.')
    make = getattr(importlib.import_module(module), cls)
    expected, loss = found(make(**SMALL, ICI_MESH_SHAPE=[1, 1, 1]), 1, jax.devices()[:1])
    for mesh in ([1, 1, 1], *MESHES):
      for n in (1, 2, 4):
        e = make(**SMALL, ICI_MESH_SHAPE=mesh)
        got, value = found(e, n, jax.devices()[:1] if mesh == [1, 1, 1] else None)
        worst = max(jax.tree.leaves(jax.tree.map(difference, got, expected)))
        of_loss = difference(value, loss)
        print(json.dumps([name, mesh, n, of_loss, float(worst)]), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
