"""Compares the kernels of attention, and a mesh of this machine's devices, with plain XLA on one.

A version of JAX was seen to pass wrong bounds of segments to cuDNN, and one of XLA to exchange rows
of a batch on meshes in which three axes are larger than 1 (see partitioning.gather_weight). Both
gave wrong gradients without any error.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from paxlite.core.trees import PyTree
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Case, Kernel
from paxlite.layers.attention.blockwise_attention import Blockwise
from paxlite.layers.attention.cached_attention import CachedKernel
from paxlite.layers.attention.partial_attention import QKV, Partial, PartialKernel
from paxlite.layers.attention.plain_attention import XlaKernel
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.feedforward import FeedForward
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import make_mesh
from paxlite.parallel.partitioning import shard

# Relative to the largest entry: bfloat16 gives about 0.01, wrong bounds or exchanged rows about 1.
_TOLERANCE = 0.05
_B, _T, _N, _K, _H = 2, 256, 4, 2, 64
_SCALE = _H**-0.5


class KernelComparison(NamedTuple):
  """How results and gradients compare."""

  what: str  # what is compared
  # the largest difference relative to the largest entry of each array; it may be NaN
  difference: float
  way_out: str  # what a run sets to do without it

  @property
  def is_wrong(self) -> bool:
    return not self.difference <= _TOLERANCE


def comparisons() -> Iterator[KernelComparison]:
  """Yields the comparisons of what runs on these devices compute with, one after the other."""
  for what, case, way_out in _cases():
    kernel = attention_kernels.first(case)
    both = [functools.partial(_with_gradients, each, case) for each in (kernel, XlaKernel())]
    yield KernelComparison(f'{kernel.name}, {what}', _difference(*both), way_out)
  for what, case in _cached():
    kernel = attention_kernels.first(case)
    if isinstance(kernel, CachedKernel):
      both = [functools.partial(_attended, each, case) for each in (kernel, XlaKernel())]
      yield KernelComparison(
        f'{kernel.name}, {what}', _difference(*both), 'USE_FLASH_ATTENTION=False'
      )
  for what, case, ids in _parts():
    part, plain = attention_kernels.parts(case), Blockwise(case.softmax)
    if not isinstance(part, Blockwise):
      both = [functools.partial(_of_part, each, case, ids) for each in (part, plain)]
      yield KernelComparison(f'parts, {what}', _difference(*both), 'CONTEXT_ATTENTION=heads')
  devices = jax.devices()
  if len(devices) >= 8 and len(devices) % 4 == 0:
    mesh = make_mesh([2, 2, len(devices) // 4], [1, 1, 1])
    name = f'mesh of {" × ".join(map(str, mesh.shape.values()))} devices'
    way_out = 'ICI_MESH_SHAPE and DCN_MESH_SHAPE with at most two axes above 1'
    yield KernelComparison(name, mesh_difference(mesh), way_out)


def _cases() -> Iterator[tuple[str, Case, str]]:
  """Yields names of cases, the cases, and what a run sets to do without their kernel."""
  q, k, v = (_random(i, _T, n) for i, n in enumerate((_N, _K, _K)))
  whole, sink = Case(q, k, v, Softmax(_SCALE)), jnp.asarray([4.0, -2.0, 0.0, 2.0])
  ids, with_sink = (_segment_ids(_T), _segment_ids(_T)), Softmax(_SCALE, sink_logit=sink)
  packed, in_window = AttentionMask(segments=ids), AttentionMask(window=64, segments=ids)
  bias = jnp.asarray(np.random.default_rng(4).normal(size=(1, _N, _T, _T)), jnp.bfloat16)
  plain, masked = 'USE_FLASH_ATTENTION=False', 'MAX_SEGMENTS_PER_SEQ=0'
  for name, way_out, changes in (
    ('whole rows', plain, {}),
    ('packed rows, bounds', masked, dict(visible=packed, max_segments=4)),
    ('packed rows, counted', masked, dict(visible=packed, max_segments=None)),
    ('a sink', plain, dict(softmax=with_sink)),
    ('a sink in packed rows', plain, dict(softmax=with_sink, visible=packed)),
    (
      'a sink in a window', plain,
      dict(softmax=dataclasses.replace(with_sink, window=64), visible=in_window),
    ),
    ('a bias', plain, dict(bias=bias)),
    ('a bias with a sink', plain, dict(softmax=with_sink, bias=bias)),
  ):  # fmt: skip
    yield name, dataclasses.replace(whole, **changes), way_out


def _cached() -> Iterator[tuple[str, Case]]:
  """Yields names and cases of the latest token of each of 64 rows, with keys of many lengths."""
  rows = 64
  drawn = _random(0, 1, _N), _random(1, _T, _K), _random(2, _T, _K)
  q, k, v = (jnp.repeat(x, rows // _B, 0) for x in drawn)
  starts = jnp.asarray(np.linspace(0, _T - 1, rows), jnp.int32)
  for name, sink in (('one query', None), ('one query and a sink', jnp.asarray([4.0, -2, 0, 2]))):
    softmax = Softmax(_SCALE, sink_logit=sink)
    yield name, Case(q, k, v, softmax, AttentionMask(starts))


def _parts() -> Iterator[tuple[str, Case, jax.Array | None]]:
  """Yields parts of the keys as a ring computes them, and the segments of these keys."""
  for length in (_T, 2 * _T, _T // 2):
    arrays = _random(0, _T, _N), _random(1, length, _K), _random(2, length, _K)
    case = Case(*arrays, Softmax(_SCALE), over_context=True)
    for ids in (None, _segment_ids(length)):
      yield f'{length} keys{", packed rows" * (ids is not None)}', case, ids


def _with_gradients(kernel: Kernel, case: Case) -> Sequence[jax.Array]:
  """Returns the context and the gradients of all arrays of a case."""
  sink, ids = case.softmax.sink_logit, case.visible.segments and case.visible.segments[0]
  others = [x for x in (sink, case.bias) if x is not None]

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
    given = iter(others)
    logit, bias = (None if x is None else next(given) for x in (sink, case.bias))
    return kernel.attend(case.with_arrays((q, k, v), ids, logit, bias))

  def function(gradient: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
    context, pull = jax.vjp(attend, *arrays)
    return context, *pull(gradient)

  return jax.jit(function)(_random(3, _T, _N), *case.arrays, *others)


def _attended(kernel: Kernel, case: Case) -> Sequence[jax.Array]:
  """Returns the context of a case."""

  def function(*arrays: jax.Array) -> jax.Array:
    q, k, v = arrays
    return kernel.attend(dataclasses.replace(case, q=q, k=k, v=v))

  return [jax.jit(function)(*case.arrays)]


def _of_part(kernel: PartialKernel, case: Case, ids: jax.Array | None) -> Sequence[jax.Array]:
  """Returns the results of a part, and gradients as if there were other parts."""
  causal = case.q.shape[1] == case.k.shape[1]

  def function(gradient: jax.Array, qkv: QKV) -> Sequence[jax.Array]:
    segments = None if ids is None else (_segment_ids(_T), ids)
    part = kernel.forward(qkv, segments, causal)
    whole = Partial((0.7 * part.context).astype(qkv[0].dtype), part.lse + 0.4)
    return *part, *kernel.backward(qkv, segments, causal, whole, gradient)

  return jax.jit(function)(_random(3, _T, _N), case.arrays)


def _random(seed: int, tokens: int, heads: int) -> jax.Array:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(_B, tokens, heads, _H)), jnp.bfloat16)


def _segment_ids(length: int) -> jax.Array:
  """Returns the segment ids of rows with several segments, one of them with padding."""
  ids_BT = np.ones((_B, _T), np.int32)
  ids_BT[0, 100:] = 2
  ids_BT[1, 37:101], ids_BT[1, 101:229], ids_BT[1, 229:] = 2, 3, 0
  return jnp.asarray(ids_BT[:, np.arange(length) * _T // length])


def _difference(one: Callable[[], Sequence[Any]], other: Callable[[], Sequence[Any]]) -> float:
  """Returns the largest difference of results relative to each one's largest entry, or NaN."""
  as_float = lambda x: np.asarray(x, np.float32)
  try:
    pairs = [(as_float(x), as_float(y)) for x, y in zip(one(), other(), strict=True)]
  except jax.errors.JaxRuntimeError:  # there is no result
    return float('nan')
  return float(np.max([np.abs(x - y).max() / np.abs(y).max() for x, y in pairs]))


class _Probe(nn.Module):
  """A feed-forward layer and the product with an embedding table, [B, T, D] to [B, T, V]."""

  model_dims: int

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    D = self.model_dims
    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')
    x_BTD = x_BTD + FeedForward(D, 2 * D, activation='relu', name='ffn')(x_BTD)
    logits = TokenEmbedding(2 * D, D, name='embedding').attend(x_BTD)
    return shard(logits, 'outer_batch', 'length', 'act_vocab')


def mesh_difference(mesh: Mesh) -> float:
  """Returns how far loss and gradients of a small model on a mesh are from those on one device."""
  rules, dims = partitioning.DEFAULT_RULES, 64 * mesh.size  # more than the tokens of a shard
  rows, length = mesh.size, 2 * mesh.size
  probe, rng = _Probe(dims), np.random.default_rng(0)
  draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
  batch = draw(rows, length, dims), draw(rows, length, 2 * dims)
  boxed = jax.eval_shape(probe.init, jax.random.key(0), batch[0])
  params = jax.tree.map(lambda p: draw(*p.shape) / 8, meta.unbox(boxed))
  shardings = jax.tree.map(lambda x: x.sharding, partitioning.sharded_shapes(boxed, mesh, rules))

  def loss(params: PyTree, x: jax.Array, targets: jax.Array) -> jax.Array:
    logits: Any = probe.apply(params, x)  # Flax declares that it may be a pair
    return (logits * targets).mean()

  def on_mesh(*arguments: PyTree) -> tuple[jax.Array, PyTree]:
    with partitioning.activate(mesh, rules):
      return gradients(*arguments)

  gradients: Callable[..., Any] = jax.value_and_grad(loss, argnums=(0, 1))
  spread = NamedSharding(mesh, partitioning.spec(('batch', None, None), rules))
  with jax.default_matmul_precision('highest'):
    got = jax.jit(on_mesh)(*jax.device_put((params, *batch), (shardings, spread, spread)))
    expected = jax.jit(gradients)(*jax.device_put((params, *batch), jax.devices()[0]))
  return _difference(lambda: jax.tree.leaves(got), lambda: jax.tree.leaves(expected))
