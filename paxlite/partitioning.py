"""The mesh, and where arrays lie on it.

Code names the logical axes of an array; one table of rules maps them to mesh axes:

    x_BTD = shard(x_BTD, 'batch', 'length', 'act_embed')

The mesh has Pax's axes (replica, data, mdl): replica copies the model (DP), data splits the batch
and the weights (FSDP), mdl splits heads, hidden units and vocabulary (TP). XLA's partitioner does
the rest.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.linen import meta
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlite.errors import UserError

MESH_AXES = ('replica', 'data', 'mdl')

Rules = Mapping[str, str | tuple[str, ...] | None]

# Weights are split in two dimensions (data × mdl) and activations in batch and width, as in Pax.
DEFAULT_RULES: Rules = {
  # activations
  'batch': ('replica', 'data'),
  'length': None,
  'act_embed': 'mdl',
  'act_heads': 'mdl',
  'act_mlp': 'mdl',
  'act_vocab': 'mdl',
  # weights
  'embed': 'data',
  'heads': 'mdl',
  'kv_heads': 'mdl',
  'head_dim': None,
  'mlp': 'mdl',
  'vocab': 'mdl',
  'qkv': None,
  'norm': None,
  'positions': None,
  'layers': None,
  'lora_rank': None,
}

_active: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar(
  'paxlite_partitioning', default=None
)


def make_mesh(ici: Sequence[int], dcn: Sequence[int]) -> Mesh:
  """The device mesh of shape `ici` × `dcn` over (replica, data, mdl).

  Args:
    ici: Devices per axis within a slice or host group (ICI, NVLink).
    dcn: Copies of that per axis across slices or hosts (DCN).

  Raises:
    UserError: the product is not the number of devices.
  """
  check_mesh_shape(ici, dcn, jax.device_count())
  # jax's own helpers lay devices out for a topology; a CPU's fake devices have none.
  if jax.devices()[0].platform == 'cpu':
    devices = np.reshape(jax.devices(), mesh_shape(ici, dcn))
  elif math.prod(dcn) > 1:
    from jax.experimental import mesh_utils

    slices = {getattr(d, 'slice_index', 0) for d in jax.devices()}
    devices = mesh_utils.create_hybrid_device_mesh(
      ici, dcn, process_is_granule=len(slices) != math.prod(dcn)
    )
  else:
    from jax.experimental import mesh_utils

    devices = mesh_utils.create_device_mesh(ici)
  return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_shape(ici: Sequence[int], dcn: Sequence[int]) -> tuple[int, ...]:
  return tuple(i * d for i, d in zip(ici, dcn, strict=True))


def check_mesh_shape(ici: Sequence[int], dcn: Sequence[int], devices: int | None) -> None:
  """Raises UserError unless both shapes fit MESH_AXES and, if given, the number of devices."""
  for name, shape in (('ICI_MESH_SHAPE', ici), ('DCN_MESH_SHAPE', dcn)):
    if len(shape) != len(MESH_AXES) or min(shape) < 1:
      raise UserError(
        f'{name}={list(shape)} must have {len(MESH_AXES)} positive sizes, '
        f'for {", ".join(MESH_AXES)}'
      )
  product = math.prod(mesh_shape(ici, dcn))
  if devices is not None and product != devices:
    raise UserError(
      f'ICI_MESH_SHAPE={list(ici)} × DCN_MESH_SHAPE={list(dcn)} asks for {product} devices and '
      f'{devices} {"is" if devices == 1 else "are"} present. To use what is here: '
      f'--fdl.ICI_MESH_SHAPE=[1,{devices},1] --fdl.DCN_MESH_SHAPE=[1,1,1]'
    )


@contextlib.contextmanager
def activate(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Iterator[None]:
  """Makes `shard` constrain arrays to `mesh` by `rules` while a program is traced."""
  token = _active.set((mesh, rules))
  try:
    yield
  finally:
    _active.reset(token)


def shard(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains `x` to the layout that the active rules give its logical axes.

  Args:
    x: An array with as many dimensions as there are names.
    *names: Logical axis names; None for a dimension that is never split.

  Raises:
    ValueError: a name has no rule, or there are too many or too few names.
  """
  if len(names) != x.ndim:
    raise ValueError(f'{len(names)} axis names {names} for an array of shape {x.shape}')
  active = _active.get()
  if active is None:
    spec(names, DEFAULT_RULES)
    return x
  mesh, rules = active
  partition = spec(names, rules)
  if mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


def spec(names: Sequence[str | None], rules: Rules) -> PartitionSpec:
  """The PartitionSpec of an array with these logical axes."""
  unknown = [n for n in names if n is not None and n not in rules]
  if unknown:
    raise ValueError(f'no sharding rule for the logical axes {unknown}; known: {sorted(rules)}')
  return PartitionSpec(*(None if n is None else rules[n] for n in names))


def param_specs(boxed_params: Any, rules: Rules) -> Any:
  """PartitionSpecs for a tree of (abstract) parameters as `param` below boxes them."""

  def one(leaf: Any) -> PartitionSpec:
    return spec(leaf.names, rules) if isinstance(leaf, nn.LogicallyPartitioned) else PartitionSpec()

  return jax.tree.map(one, boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def fitting(
  partition: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
  """`partition` without the mesh axes that do not divide their dimension (a vocabulary of 50257).

  Args:
    partition: What the rules ask for.
    shape: The array's shape.
    sizes: Mesh axis sizes.
  """

  def one(entry, dim):
    axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    return entry if dim % math.prod(sizes[a] for a in axes) == 0 else None

  entries = tuple(partition) + (None,) * (len(shape) - len(partition))
  return PartitionSpec(*(one(e, d) for e, d in zip(entries, shape, strict=True)))


def sharded_shapes(boxed_params: Any, mesh: Mesh, rules: Rules) -> Any:
  """jax.ShapeDtypeStructs of a tree of abstract parameters as `param` boxes them, on a mesh."""
  sizes = dict(mesh.shape)

  def one(x: jax.ShapeDtypeStruct, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, fitting(partition, x.shape, sizes))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(one, meta.unbox(boxed_params), param_specs(boxed_params, rules))


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
  """The layout of a batch's arrays [batch, length]."""
  return NamedSharding(mesh, spec(('batch', 'length'), rules))


def param(
  module: nn.Module,
  name: str,
  init: Any,
  shape: Sequence[int],
  axes: Sequence[str | None],
) -> jax.Array:
  """Declares a float32 parameter of `module` together with its logical axes."""
  if len(shape) != len(axes):
    raise ValueError(f'{name}: {len(axes)} axis names {axes} for shape {shape}')
  boxed_init: Any = nn.with_logical_partitioning(init, tuple(axes))
  return module.param(name, boxed_init, tuple(shape), 'float32')


def process_rows(sharding: NamedSharding, batch_size: int) -> slice:
  """The rows of a global batch that the devices of this process hold."""
  indices = sharding.addressable_devices_indices_map((batch_size, 1)).values()
  bounds = [index[0].indices(batch_size) for index in indices if index is not None]
  return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))
