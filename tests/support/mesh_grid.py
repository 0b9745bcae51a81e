"""python -m tests.support.mesh_grid ICI… [CASE…] [NAME=VALUE…]: compares meshes with one device.

A mesh shape is '2,2,2', or '1,2,2/2,1,1' with a shape over DCN. A case is model/width/loss chunks,
with '/tied' for tied embeddings; without a case, all of them run. NAME is an attribute, or ROWS,
the rows of the whole batch, or ORDER, a list of seeds of random orders of the devices. Prints one
JSON line per case and order with the largest relative differences of the loss and of any gradient.
"""

import contextlib
import functools
import itertools
import json
import math
import sys
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.parallel import partitioning
from tests.support.meshes import batch_of, compiled, largest

ROWS, SEQ_LEN = 8, 16  # of the whole batch: 32 tokens per shard on the mesh 2 × 2 × 2
BASE = dict(
  NUM_LAYERS=1, NUM_HEADS=8, VOCAB_SIZE=64, MAX_SEQ_LEN=SEQ_LEN, FPROP_DTYPE='float32',
  USE_REPEATED_LAYER=False,
)  # fmt: skip
MODELS: dict[str, Any] = {
  'gpt': (GPT126M, {}),
  'llama': (LLaMA, dict(NUM_KV_HEADS=2)),
  'moe': (MixtureOfExperts, dict(NUM_LAYERS=2, NUM_EXPERTS=8, NUM_MOE_GROUPS=8)),
}
WIDTHS = (16, 128)  # smaller and larger than the number of tokens of a shard
CHUNKS = (1, 4)


def experiment(model: str, width: int, chunks: int, tied: bool, **changes: Any) -> Any:
  cls, values = MODELS[model]
  sizes = dict(MODEL_DIMS=width, HIDDEN_DIMS=2 * width, NUM_LOSS_CHUNKS=chunks)
  return cls(**BASE | values | sizes | dict(SEPARATE_EMBEDDING=not tied) | changes)


@functools.cache
def one_device(
  model: str, width: int, tied: bool, rows: int, changes: tuple[tuple[str, Any], ...]
) -> Any:
  """Returns a state, and (gradients, metrics) for it on one device."""
  mesh = dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1], PERCORE_BATCH_SIZE=rows)
  of_meshes = (
    'MESH_AXES', 'SEQUENCE_SHARDED_ACTIVATIONS', 'CONTEXT_ATTENTION', 'NUM_PIPELINE_REPEATS',
  )  # fmt: skip
  kept = {k: v for k, v in changes if k not in of_meshes}
  e = experiment(model, width, 1, tied, **mesh | kept)
  task = fdl.build(e.build_task())
  state = jax.jit(lambda rng: meta.unbox(task.init(rng)))(jax.random.key(0))
  return jax.device_get((state, gradients(task, None)(state, batch_of(e))))


def gradients(task: Any, where: tuple[Any, Any] | None) -> Any:
  """Returns a compiled function of a state and a batch, on a mesh with its rules or one device."""

  def grads(state: Any, batch: Any) -> Any:
    with partitioning.activate(*where) if where else contextlib.nullcontext():
      return task.grads(state.params, batch, None, state.fp8_state)[::2]

  return lambda *arguments: compiled(jax.jit(grads), *arguments)(*arguments)


def difference(a: Any, b: Any) -> float:
  return float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / (np.max(np.abs(b)) + 1e-30))


def check(ici: list[int], dcn: list[int], case: str, changes: dict[str, Any]) -> dict[str, Any]:
  model, width, chunks, *tied = case.split('/')
  changes = dict(changes)
  rows, order = changes.pop('ROWS', ROWS), changes.pop('ORDER', None)
  if model == 'moe' and 'NUM_LAYERS' in changes:
    changes['NUM_LAYERS'] *= 2  # every second block has experts
  rows_a_device = rows / math.prod(ici + dcn)
  mesh_values = dict(ICI_MESH_SHAPE=ici, DCN_MESH_SHAPE=dcn, PERCORE_BATCH_SIZE=rows_a_device)
  e = experiment(model, int(width), int(chunks), bool(tied), **mesh_values | changes)
  e.validate()
  mesh, task = e.mesh(), fdl.build(e.build_task())
  if order is not None:
    devices = np.random.default_rng(order).permutation(mesh.devices.ravel())
    mesh = Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names)
  hashable = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in changes.items())
  state, (expected, metrics) = one_device(model, int(width), bool(tied), rows, hashable)
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  shapes = partitioning.sharded_shapes(boxed, mesh, e.rules)
  state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, shapes)
  batch = jax.device_put(batch_of(e), partitioning.batch_sharding(mesh, e.rules))
  got, got_metrics = jax.device_get(gradients(task, (mesh, e.rules))(state, batch))
  worst = jax.tree.map(difference, got, expected)
  value, path = largest(worst)
  loss = difference(got_metrics['total_loss'].value, metrics['total_loss'].value)
  exact = float(got_metrics['total_loss'].value).hex()
  found = {'mesh': [ici, dcn], 'case': case, 'loss': loss, 'gradient': value, 'at': path}
  return found | {'exact': exact}


def main(arguments: list[str]) -> None:
  named = [a for a in arguments if a.partition('/')[0] in MODELS]
  every = itertools.product(MODELS, WIDTHS, CHUNKS, ('', '/tied'))
  cases = named or [f'{model}/{width}/{chunks}{tied}' for model, width, chunks, tied in every]
  changes = {k: json.loads(v) for k, _, v in (a.partition('=') for a in arguments if '=' in a)}
  shapes = [a for a in arguments if '=' not in a and a not in named]
  for case, shape, order in itertools.product(cases, shapes, changes.pop('ORDER', [None])):
    ici, _, dcn = shape.partition('/')
    read = lambda text: [int(n) for n in text.split(',')]
    sizes = read(ici), read(dcn or ','.join('1' * len(read(ici))))
    result = check(*sizes, case, changes | {'ORDER': order})
    print(json.dumps(result), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
