"""python -m tests.support.meshes [CASE…]: compares meshes of 8 devices with one device.

Prints one JSON line per case: the largest relative differences of the loss and of the gradients,
and the collectives of the mesh's program.
"""

import functools
import json
import math
import re
import sys
from typing import Any
from unittest import mock

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import meta

from paxlite.aot.collectives import collectives
from paxlite.aot.hlo import Program
from paxlite.compilation import compiler
from paxlite.config.attribute_kinds import Kind
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.layers.precision import scattered_gradient
from paxlite.parallel import partitioning, torus

SMALL = dict(
  NUM_LAYERS=4, MODEL_DIMS=32, NUM_HEADS=4, HIDDEN_DIMS=64, VOCAB_SIZE=128, MAX_SEQ_LEN=64,
  FPROP_DTYPE='float32', USE_REPEATED_LAYER=True, PERCORE_BATCH_SIZE=2, DCN_MESH_SHAPE=[1, 1, 1],
)  # fmt: skip
GLAM = SMALL | dict(NUM_EXPERTS=8, NUM_MOE_GROUPS=8)
MODELS: dict[str, Any] = {
  'gpt': (GPT126M, SMALL),
  'llama': (LLaMA, SMALL | dict(NUM_KV_HEADS=2)),
  'mtp': (LLaMA, SMALL | dict(NUM_KV_HEADS=2, NUM_PREDICTION_MODULES=2, NUM_LAYERS=2)),
  'glam': (GLaM126M64E, GLAM),
  # This loss is a mean over targets plus a large auxiliary term.
  'moe': (MixtureOfExperts, GLAM | dict(AUX_LOSS_COEF=1.0)),
  'dropless': (GLaM126M64E, GLAM | dict(USE_DROPLESS_MOE=True)),
  # data does not divide the number of experts
  'dropless_6': (GLaM126M64E, GLAM | dict(USE_DROPLESS_MOE=True, NUM_EXPERTS=6)),
}


def model_of(name: str) -> tuple[type, dict[str, Any]]:
  """Returns the class and the values of a model: one of MODELS, or a tiny one of a family."""
  if name in MODELS:
    return MODELS[name]
  from tests.support.families import ON_MESHES, experiment

  e = experiment(name, **ON_MESHES[name])
  sizes = e.values_of(Kind.SHAPE, Kind.FUNCTION)
  kept = {k: v for k, v in SMALL.items() if k not in sizes}
  if not e.USE_REPEATED_LAYER:  # blocks that are linked, of which no layer is repeated
    kept['USE_REPEATED_LAYER'] = False
  groups = {'NUM_MOE_GROUPS': 8} if isinstance(e, MixtureOfExperts) else {}
  return type(e), sizes | kept | groups | {'HEADS_SPAN_MODEL': False}


AXES = ['replica', 'data', 'mdl']
MESHES: dict[str, dict[str, Any]] = {
  'dp': dict(ICI_MESH_SHAPE=[8, 1, 1]),
  'fsdp': dict(ICI_MESH_SHAPE=[1, 8, 1]),
  'tp4': dict(ICI_MESH_SHAPE=[1, 2, 4]),
  'dp_fsdp_tp': dict(ICI_MESH_SHAPE=[2, 2, 2]),
  'dcn': dict(ICI_MESH_SHAPE=[1, 2, 2], DCN_MESH_SHAPE=[2, 1, 1]),
  'dcn_data': dict(ICI_MESH_SHAPE=[1, 2, 2], DCN_MESH_SHAPE=[1, 2, 1]),
  'sequence': dict(ICI_MESH_SHAPE=[1, 4, 2], SEQUENCE_SHARDED_ACTIVATIONS=True),
  'context': dict(MESH_AXES=[*AXES, 'context'], ICI_MESH_SHAPE=[1, 2, 1, 4]),
  'context_tp': dict(MESH_AXES=[*AXES, 'context'], ICI_MESH_SHAPE=[1, 2, 2, 2]),
  'pipeline': dict(MESH_AXES=['stage', *AXES], ICI_MESH_SHAPE=[2, 1, 4, 1], NUM_MICROBATCHES=4),
  'pipeline_tp': dict(MESH_AXES=['stage', *AXES], ICI_MESH_SHAPE=[2, 1, 2, 2], NUM_MICROBATCHES=2),
  'expert_tp': dict(MESH_AXES=[*AXES, 'expert'], ICI_MESH_SHAPE=[1, 2, 2, 2]),
  'expert_fsdp': dict(ICI_MESH_SHAPE=[1, 8, 1], EXPERT_AXIS=None),
  'pipeline_sequence': dict(
    MESH_AXES=['stage', *AXES], ICI_MESH_SHAPE=[2, 1, 2, 2], NUM_MICROBATCHES=2,
    SEQUENCE_SHARDED_ACTIVATIONS=True,
  ),
  'fractional': dict(ICI_MESH_SHAPE=[1, 4, 2], PERCORE_BATCH_SIZE=0.5),
  'torus': dict(ICI_MESH_SHAPE=[1, 8, 1]),
  'torus_dp': dict(ICI_MESH_SHAPE=[2, 4, 1]),
  'torus_chunks': dict(ICI_MESH_SHAPE=[1, 8, 1], NUM_LOSS_CHUNKS=3),
  'torus_expert': dict(MESH_AXES=[*AXES, 'expert'], ICI_MESH_SHAPE=[1, 4, 1, 2]),
}  # fmt: skip
# The test takes the devices along data as lines of these sizes, as on a TPU.
LINES = {'torus': (2, 4), 'torus_dp': (2, 2), 'torus_chunks': (2, 2, 2), 'torus_expert': (2, 2)}


def experiment(model: str, mesh: str) -> Any:
  cls, values = model_of(model)
  e = cls(**values | dict(MESH_AXES=AXES) | MESHES[mesh])
  e.validate()
  return e


@functools.cache
def one_device(model: str, rows: float, microbatches: int) -> tuple[Any, Any, Any]:
  """Returns parameters, a batch, and what is computed without a mesh and without a pipeline.

  Args:
    model: The model.
    rows: Rows of the batch, for each of 8 devices.
    microbatches: Parts of the batch that are computed in turn.
  """
  cls, values = model_of(model)
  whole = dict(PERCORE_BATCH_SIZE=8 * rows, NUM_MICROBATCHES=microbatches, ICI_MESH_SHAPE=[1, 1, 1])
  e = cls(**values | whole)
  task, batch = fdl.build(e.build_task()), batch_of(e)
  initialize = jax.jit(lambda rng: meta.unbox(task.init_params(rng)))
  params = compiled(initialize, jax.random.key(0))(jax.random.key(0))
  grads = jax.jit(lambda params, batch: task.grads(params, batch, None)[::2])
  return jax.device_get((params, batch, compiled(grads, params, batch)(params, batch)))


# Kernels of YNNPACK round differently from CPU to CPU: with those for AVX-512, one entry of the
# gradient of Gemma 3's embedding is 1.26e-5 away on two axes; without them, the largest is 2.7e-6.
_NO_YNNPACK = {'xla_cpu_experimental_ynn_fusion_type': ''}


def compiled(function: Any, *args: Any) -> Any:
  """Compiles without LLVM's optimizations, which take most of the time and change nothing here."""
  known = {k: v for k, v in _NO_YNNPACK.items() if compiler.is_known_here(k, v)}
  return function.lower(*args).compile({'xla_backend_optimization_level': 0} | known)


def batch_of(e) -> dict[str, np.ndarray]:
  """Returns packed rows: two segments each, and padding at the end of every second row."""
  rng = np.random.default_rng(0)
  B, T = e.batch_size, e.MAX_SEQ_LEN
  ids = rng.integers(0, e.VOCAB_SIZE, (B, T + 1)).astype(np.int32)
  cut = T // 3
  segments = np.broadcast_to(np.where(np.arange(T) < cut, 1, 2), (B, T)).astype(np.int32).copy()
  segments[::2, -T // 4 :] = 0
  positions = np.where(np.arange(T) < cut, np.arange(T), np.arange(T) - cut)
  return {
    'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': (segments > 0).astype(np.float32),
    'segment_ids': segments, 'segment_pos': np.broadcast_to(positions, (B, T)).astype(np.int32),
  }  # fmt: skip


def difference(a: Any, b: Any) -> float:
  a, b = np.asarray(a), np.asarray(b)
  return float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) + 1e-30))


def largest(differences: Any) -> tuple[float, str]:
  """Returns the largest of a tree of differences, NaN before all numbers, and where it is."""
  found = [(v, jax.tree_util.keystr(p)) for p, v in jax.tree.leaves_with_path(differences)]
  return max(found, key=lambda one: (math.isnan(one[0]), one[0]))


def check(name: str) -> dict[str, Any]:
  lines = LINES.get(name.split('/')[1])
  if lines is None:
    return _check(name)
  cores = mock.patch.object(scattered_gradient, 'has_sparse_cores', return_value=True)
  with mock.patch.object(torus, 'lines', return_value=lines), cores:
    return _check(name)


def _check(name: str) -> dict[str, Any]:
  model, mesh_name = name.split('/')
  e = experiment(model, mesh_name)
  mesh, task = e.mesh(), fdl.build(e.build_task())
  host, batch, (expected, one) = one_device(model, e.PERCORE_BATCH_SIZE, e.NUM_MICROBATCHES)
  boxed = jax.eval_shape(task.init_params, jax.random.key(0))
  shapes = partitioning.sharded_shapes(boxed, mesh, e.rules)
  result: dict[str, Any] = {'case': name}
  if mesh_name == 'fsdp':
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    init = jax.jit(lambda rng: meta.unbox(task.init_params(rng)), out_shardings=shardings)
    memory = compiled(init, jax.random.key(0)).memory_analysis()
    made = memory.output_size_in_bytes + memory.temp_size_in_bytes
    # memory of one device while parameters are initialized
    result['init'] = made / sum(x.nbytes for x in jax.tree.leaves(host))
  params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), host, shapes)
  batch = jax.device_put(batch, partitioning.batch_sharding(mesh, e.rules))

  @jax.jit
  def on_mesh(params: Any, batch: Any) -> Any:
    with partitioning.activate(mesh, e.rules):
      return task.grads(params, batch, None)[::2]

  program = compiled(on_mesh, params, batch)
  text = program.as_text()
  grads, metrics = jax.device_get(program(params, batch))
  worst = jax.tree.map(difference, grads, expected)
  value, path = largest(worst)
  result |= {'gradient': value, 'at': path}
  result['loss'] = difference(metrics['total_loss'].value, one['total_loss'].value)
  found: dict[str, int] = {}
  for c in collectives(Program(text), e.mesh_sizes):
    key = f'{c.kind} {"+".join(c.axes)}'
    found[key] = max(found.get(key, 0), c.bytes)
  result['collectives'] = found
  T = e.MAX_SEQ_LEN
  sums = re.findall(r'= (.*) (?:all-reduce|reduce-scatter)', text)
  result['exchanges heads'] = 'dot_product/shard_map/all_to_all' in text
  result['sums of scores'] = [x for x in sums if f'{T},{T}]' in x]
  return result | {'activation': e.batch_size * T * e.MODEL_DIMS * 4}


def main(names: list[str]) -> None:
  for name in names:
    print(json.dumps(check(name)), flush=True)


if __name__ == '__main__':
  jnp.zeros(())
  main(sys.argv[1:])
