"""The gradient of a weight, scattered over the torus of a TPU while it is summed.

FSDP splits a weight over the mesh axis data. The gradient of the weight is a sum over the devices
along data, and each device needs its own part of the sum. XLA's compiler for TPUs scatters such a
sum along one line of the torus. Where data goes through several lines, it sums the whole gradient
on every device and then cuts it, even if the program asks for a reduce-scatter (libtpu 0.0.52, 64
and 256 chips of v5e). On 32 chips it splits the product and sends partial sums on, which reads the
activations again for each part. Here the sum is scattered along one line after the other. A device
sends half as many bytes as for a whole sum, which it never holds.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from paxlite.parallel import torus
from paxlite.parallel.devices import has_sparse_cores
from paxlite.parallel.partitioning import active_mesh, axes_of, fitting, spec

_AXIS = 'data'


class Scatter(NamedTuple):
  """How the gradient of a weight is summed."""

  mesh: Mesh
  batch: tuple[str, ...]  # the mesh axes over which the rows of the batch are split
  dim: int  # the dimension of the weight that is split over data
  lines: tuple[int, ...]  # sizes of the lines of the torus along data, the outermost first


def scatter_of(rows: int, shape: Sequence[int], names: Sequence[str | None]) -> Scatter | None:
  """Returns how the gradient of a weight is scattered on the active mesh.

  None means that XLA sums it: where XLA can scatter the sum, and on meshes that split more than the
  batch.

  Args:
    rows: The rows of the batch.
    shape: The weight's shape.
    names: The logical axes of the weight.
  """
  active = active_mesh()
  if active is None:
    return None
  mesh, rules = active
  sizes = dict(mesh.shape)
  batch = axes_of(rules['batch'])
  shards = math.prod(sizes[a] for a in batch)
  if _AXIS not in batch or shards < mesh.size or rows % shards:
    return None
  split = [
    tuple(a for a in axes_of(entry) if sizes[a] > 1)
    for entry in fitting(spec(names, rules), shape, sizes)
  ]
  if [axes for axes in split if axes] != [(_AXIS,)]:
    return None
  lines = torus.lines(mesh, _AXIS)
  return Scatter(mesh, batch, split.index((_AXIS,)), lines) if len(lines) > 1 else None


def scattered_sum(
  equation: str, rows: str, scatter: Scatter, x: jax.Array, y: jax.Array
) -> jax.Array:
  """Returns jnp.einsum(equation, x, y), a gradient that is split over data.

  Args:
    equation: Einsum equation with single letters, no space and no ellipsis.
    rows: The letter of the dimension of x and y that is the batch.
    scatter: How the gradient is summed.
    x: Activations.
    y: Other activations.
  """
  x_dims, y_dims, made_dims = equation.replace('->', ',').split(',')
  others = tuple(a for a in scatter.batch if a != _AXIS and scatter.mesh.shape[a] > 1)

  def of_one_device(x: jax.Array, y: jax.Array) -> jax.Array:
    part = _scattered(jnp.einsum(equation, x, y), _AXIS, scatter.dim, scatter.lines)
    return jax.lax.psum(part, others) if others else part

  split = lambda dims: PartitionSpec(*[scatter.batch if d == rows else None for d in dims])
  made = PartitionSpec(*[_AXIS if i == scatter.dim else None for i in range(len(made_dims))])
  return jax.shard_map(
    of_one_device, mesh=scatter.mesh, in_specs=(split(x_dims), split(y_dims)), out_specs=made,
    check_vma=False,
  )(x, y)  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scattered_product(equation: str, scatter: Scatter, x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns jnp.einsum(equation, x, w). There is no forward-mode derivative (jax.jvp).

  Args:
    equation: Einsum equation of x and w, with single letters, no space and no ellipsis.
    scatter: How the gradient of w is summed.
    x: Activations. The first dimension is the batch.
    w: The weight.
  """
  return jnp.einsum(equation, x, w)


def _backward(
  equation: str, scatter: Scatter, factors: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, w = factors
  x_dims, w_dims, out_dims = equation.replace('->', ',').split(',')
  x_grad = jnp.einsum(f'{out_dims},{w_dims}->{x_dims}', grad, w)
  # the order of the factors is that of JAX's own derivative
  w_grad = scattered_sum(f'{out_dims},{x_dims}->{w_dims}', x_dims[0], scatter, grad, x)
  return x_grad.astype(x.dtype), w_grad.astype(w.dtype)


scattered_product.defvjp(
  lambda equation, _, *factors: (jnp.einsum(equation, *factors), factors), _backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(part: jax.Array, axis: str, dim: int, lines: tuple[int, ...]) -> jax.Array:
  """Returns a whole weight in jax.shard_map, whose gradient is summed and scattered.

  XLA runs gathers along one line of the torus on the SparseCores of a TPU, beside kernels. Where
  there are some, the weight is gathered along one line after the other.

  Args:
    part: The device's part of the weight.
    axis: The mesh axis over which the weight is split.
    dim: The dimension that is split.
    lines: The sizes of the lines of the torus along the mesh axis, the outermost first.
  """
  return _gathered(part, axis, dim, lines)


gathered.defvjp(  # policies of jax.checkpoint know all_gather, and not a call of `gathered`
  lambda part, axis, dim, lines: (_gathered(part, axis, dim, lines), None),
  lambda axis, dim, lines, _, grad: (_scattered(grad, axis, dim, lines),),
)


def _gathered(x: jax.Array, axis: str, dim: int, lines: Sequence[int]) -> jax.Array:
  """Returns the devices' parts along a mesh axis, in their order."""
  active = active_mesh()
  if len(lines) == 1 or active is None or not has_sparse_cores(active[0].devices.flat[0]):
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)
  for groups in reversed(_groups(lines)):
    x = jax.lax.all_gather(x, axis, axis_index_groups=groups, axis=dim, tiled=True)
  return x


def _scattered(x: jax.Array, axis: str, dim: int, lines: Sequence[int]) -> jax.Array:
  """Returns the device's part of the sum of x over a mesh axis."""
  for groups in _groups(lines):
    x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
  return x


def _groups(lines: Sequence[int]) -> list[list[list[int]]]:
  """Returns the devices of each line, for each dimension of the rectangle, the outermost first."""
  devices = np.arange(math.prod(lines)).reshape(lines)
  return [np.moveaxis(devices, i, -1).reshape(-1, n).tolist() for i, n in enumerate(lines)]
