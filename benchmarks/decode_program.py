"""python -m benchmarks.decode_program [--experiment=LLaMA7B] [--rows=1] [--apart] [NAME=VALUE …]

Compiles the loop over tokens for one device, which need not be there, and prints how many kernels a
token takes and how many bytes it moves, against those of the weights and the cache. --tokens: how
many tokens each sequence has, beyond which kernels for cached keys read nothing. --apart leaves
the weights as training has them. NAME=VALUE sets an attribute. Needs the extra cuda or tpu.
"""

import argparse
import json
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import paxlite
from benchmarks.gpu.decode import shapes
from paxlite.aot import targets
from paxlite.aot.costs import Costs
from paxlite.aot.hlo import Program
from paxlite.config.attributes import parse
from paxlite.core.trees import PyTree
from paxlite.generation.cache import Pages
from paxlite.generation.engine import Engine
from paxlite.generation.fused_projections import FusedProjections
from paxlite.quantization.frozen_weights import put_scheme
from paxlite.quantization.schemes import Int8


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n', 1)[1])
  parser.add_argument('--experiment', default='LLaMA7B')
  parser.add_argument('--rows', type=int, default=1)
  parser.add_argument('--slots', type=int, default=1024, help='tokens that the cache has room for')
  parser.add_argument('--tokens', type=int, help='tokens that each sequence has; as many as slots')
  parser.add_argument('--target', default='h100x1', help='the kind of device, such as v5e-4')
  parser.add_argument('--apart', action='store_true')
  parser.add_argument('values', nargs='*', metavar='NAME=VALUE')
  args = parser.parse_args()

  cls = paxlite.get(args.experiment)
  here = dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1], FPROP_DTYPE='bfloat16')
  given = dict(pair.split('=', 1) for pair in args.values)
  e = cls(**here, **{name: parse(cls, name, text) for name, text in given.items()})
  e = e.plain.replaced(**e.decoding_values)
  target = targets.parse(args.target)
  mesh = e.mesh(target.topology()[:1])
  config = e.build_task()
  if e.INT8_WEIGHTS:
    put_scheme(config.model, Int8)
  whole = NamedSharding(mesh, PartitionSpec())

  def abstract(tree: PyTree, dtype: str = 'float32') -> PyTree:
    kind = lambda x: jnp.dtype(dtype) if x.dtype == jnp.float32 else x.dtype
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kind(x), sharding=whole), tree)

  params = abstract(shapes(config, mesh, e), e.FPROP_DTYPE)
  if not args.apart:
    params = abstract(jax.eval_shape(FusedProjections(config, mesh, e.rules).fused, params))
  engine = Engine(
    fdl.build(config).model, params, e.MAX_SEQ_LEN, mesh=mesh, rules=e.rules,
    kv_cache_dtype=e.KV_CACHE_DTYPE,
    pages=None if e.KV_CACHE_TOKENS is None else Pages.of(e.KV_CACHE_TOKENS),
  )  # fmt: skip
  compiled = engine.lowered(args.rows, args.slots).compile()

  program = Program(compiled.as_text())
  costs = Costs(program, 'gpu' if target.chip and target.chip.gpu else 'tpu')
  loop = next(i for i in program.entry if i.opcode == 'while')
  (body,) = program.called(loop)
  kernels = [k for i in body if (k := costs.kernel(body, i)) is not None]
  calls = [i for i in body if re.search(r'cached_attention|__cudnn\$fmha', i.attributes)]
  unread = 0.0
  if args.tokens and calls:
    assert len(calls) == e.NUM_LAYERS, len(calls)
    room = e.KV_CACHE_TOKENS or args.rows * args.slots
    unread = engine.cache_bytes(args.rows, args.slots) * (1 - args.rows * args.tokens / room)
  # it writes one block of each sequence, in place
  puts = [k for i in body if 'put_into_cache' in i.name and (k := costs.kernel(body, i))]
  moved = sum(kernel.bytes for kernel in kernels) - unread - sum(kernel.bytes for kernel in puts)
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  table = e.VOCAB_SIZE * e.MODEL_DIMS * 2 if e.SEPARATE_EMBEDDING else 0  # one row of it is read
  least = size(params) - table + engine.cache_bytes(args.rows, args.slots)
  print(json.dumps({
    'experiment': args.experiment, 'values': given, 'target': args.target, 'rows': args.rows,
    'slots': args.slots, 'tokens': args.tokens or args.slots, 'jax': jax.__version__,
    'joined': not args.apart, 'layers': e.NUM_LAYERS, 'kernels': len(kernels),
    'kernels_for_cached_keys': len(calls),
    'kernels_per_layer': len(kernels) // e.NUM_LAYERS, 'gigabytes': moved / 1e9,
    'of_weights_and_cache': moved / least,
  }))  # fmt: skip


if __name__ == '__main__':
  main()
