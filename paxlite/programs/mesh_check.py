"""Compares a small program on the run's mesh with the same program on one device, before training.

XLA's partitioner was seen to exchange rows of a batch on meshes in which the axes replica, data and
mdl are all larger than 1 (see partitioning.gather_weight). If a version of XLA does this in other
places too, the run must stop instead of training with wrong gradients.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.feedforward import FeedForward
from paxlite.parallel import partitioning
from paxlite.parallel.partitioning import Rules, shard

_TOLERANCE = 1e-3  # relative to the largest entry; exchanged rows give a difference of about 1


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


def check_mesh(mesh: Mesh, rules: Rules) -> None:
  """Compares loss and gradients of a small model on the mesh with those on one device.

  A mesh with fewer than three axes larger than 1 is not checked. Every process has to call this.

  Raises:
    UserError: They differ, so that training would use wrong gradients without any error.
  """
  if sum(size > 1 for size in mesh.shape.values()) < 3:
    return
  wrong = _largest_difference(mesh, rules)
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    wrong = float(np.max(multihost_utils.process_allgather(np.float32(wrong))))
  if not wrong <= _TOLERANCE:
    axes = ' × '.join(f'{name} {size}' for name, size in mesh.shape.items() if size > 1)
    raise UserError(
      f'on the mesh {axes}, XLA of jax {jax.__version__} computes gradients that differ from those '
      f'of one device by {wrong:.1g} of the largest: training would go wrong. Choose '
      'ICI_MESH_SHAPE and DCN_MESH_SHAPE with one axis fewer above 1, or another version of jax'
    )


def _largest_difference(mesh: Mesh, rules: Rules) -> float:
  """Returns the largest difference between the mesh and one device.

  It is relative to the largest entry of each result.
  """
  sizes = dict(mesh.shape)
  rows = partitioning.num_shards(sizes, rules, 'outer_batch')
  length = 2 * partitioning.num_shards(sizes, rules, 'residual_length')
  divisor = math.lcm(sizes['data'], sizes['mdl'])
  dims = divisor * -(-max(64, 4 * length) // divisor)  # more than the tokens of a shard
  probe = _Probe(dims)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(rows, length, dims)).astype(np.float32)
  targets = rng.normal(size=(rows, length, 2 * dims)).astype(np.float32)
  boxed = jax.eval_shape(probe.init, jax.random.key(0), x)
  shapes = partitioning.sharded_shapes(boxed, mesh, rules)
  params = jax.tree.map(
    lambda p: rng.normal(size=p.shape).astype(np.float32) / 8, meta.unbox(boxed)
  )

  def loss(params: PyTree, x: jax.Array, targets: jax.Array) -> jax.Array:
    logits: Any = probe.apply(params, x)  # Flax declares that it may be a pair
    return (logits * targets).mean()

  def on_mesh(*arguments: PyTree) -> tuple[jax.Array, PyTree]:
    with partitioning.activate(mesh, rules):
      return jax.value_and_grad(loss, argnums=(0, 1))(*arguments)

  batch = NamedSharding(mesh, partitioning.spec(('batch', None, None), rules))
  put = lambda value, sharding: jax.make_array_from_callback(
    value.shape, sharding, lambda index: value[index]
  )
  placed = jax.tree.map(lambda value, like: put(value, like.sharding), params, shapes)
  with jax.default_matmul_precision('highest'):
    got = jax.jit(on_mesh)(placed, put(x, batch), put(targets, batch))
    device = jax.local_devices()[0]
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(
      *jax.device_put((params, x, targets), device)
    )
  differences = jax.tree.map(_difference, got, jax.device_get(expected))
  return float(np.max(jax.tree.leaves(differences)))  # max() would leave out a NaN


def _difference(got: jax.Array, expected: np.ndarray) -> float:
  """Returns the largest relative difference in this process's shards of one result."""
  parts = [np.abs(np.asarray(s.data) - expected[s.index]).max() for s in got.addressable_shards]
  return float(np.max(parts) / np.abs(expected).max())
