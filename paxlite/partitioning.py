"""The mesh, and where arrays lie on it.

Code names the logical axes of an array; one table of rules maps them to mesh axes:

    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')

The mesh has Pax's axes (replica, data, mdl), and others where a run asks for them:

    stage    splits the layers of a repeated stack (pipeline parallelism)
    replica  copies the model and splits the batch (DP)
    data     splits the batch and the weights (FSDP)
    expert   splits the batch, and experts (expert parallelism)
    context  splits the length of the activations (context parallelism)
    mdl      splits heads, hidden units and vocabulary (TP)

XLA's partitioner does the rest.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.linen import meta
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlite import shell
from paxlite.errors import UserError

MESH_AXES = ('replica', 'data', 'mdl')
KNOWN_AXES = ('stage', 'replica', 'data', 'expert', 'context', 'mdl')

Rules = Mapping[str, str | tuple[str, ...] | None]

# Weights are split in two dimensions (data × mdl) and activations in batch and width, as in Pax.
ALL_RULES: Rules = {
  # activations
  'batch': ('replica', 'data', 'expert'),
  'outer_batch': ('replica', 'data', 'expert', 'stage'),  # of logits
  'lookup_batch': ('replica', 'expert'),  # of what is looked up in a table that is split by data
  'lookup_embed': 'data',
  'length': 'context',
  'residual_length': 'context',  # of what goes from one layer to the next
  'kv_length': None,  # a query's keys are all of its sequence: gathered over context
  'act_embed': 'mdl',
  'act_heads': 'mdl',
  'act_kv_heads': 'mdl',
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
  'layers': 'stage',
  'lora_rank': None,
  # experts: see experiments.experts
  'experts': 'expert',
  'expert_embed': 'data',
  'expert_groups': ('replica', 'data'),
  # Transformer Engine's names for its layer
  'nvte_batch': ('replica', 'data', 'expert'),
  'nvte_seqlen': 'context',
  'nvte_seqlen_tp': None,
  'nvte_seqlen_cp': 'context',
  'nvte_head': 'mdl',
  'nvte_hidden': None,
  'nvte_hidden_tp': 'mdl',
  'nvte_joined': None,
  'nvte_w_fsdp': 'data',
  'nvte_w_tp': 'mdl',
  'nvte_w_joined': None,
  'nvte_w_no_shard': None,
}


def rules_for(axes: Sequence[str], rules: Rules = ALL_RULES) -> Rules:
  """`rules` without the mesh axes that are not among `axes`."""

  def one(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    kept = tuple(a for a in axes_of(entry) if a in axes)
    return None if not kept else kept[0] if isinstance(entry, str) else kept

  return {name: one(entry) for name, entry in rules.items()}


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes of one entry of a rule or a PartitionSpec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


DEFAULT_RULES: Rules = rules_for(MESH_AXES)

_active: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar(
  'paxlite_partitioning', default=None
)


def make_mesh(
  ici: Sequence[int],
  dcn: Sequence[int],
  axes: Sequence[str] = MESH_AXES,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """The device mesh of shape `ici` × `dcn` over `axes`.

  Args:
    ici: Devices per axis within a slice or host (ICI, NVLink).
    dcn: Copies of that per axis across slices or hosts (DCN).
    axes: Of KNOWN_AXES, in the order of both shapes.
    devices: All that are present where None.

  Raises:
    UserError: the product is not the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  check_mesh_shape(ici, dcn, axes, len(devices))
  return Mesh(
    device_order(ici, _full(dcn, len(axes)), devices),
    tuple(axes),
    axis_types=(AxisType.Auto,) * len(axes),
  )


def device_order(ici: Sequence[int], dcn: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """The devices as an array of shape ici × dcn, each copy over DCN from one slice or host.

  Raises:
    UserError: they are several slices of TPUs, and `dcn` is for another number.
  """
  granules = _granules(devices, math.prod(dcn))
  # Within a slice of TPUs jax knows which neighbours make a good ring; elsewhere any order is as
  # good as another.
  if devices[0].platform == 'tpu':
    from jax.experimental import mesh_utils

    slices = len({_slice(d) for d in devices})
    if slices != math.prod(dcn):
      raise UserError(
        f'DCN_MESH_SHAPE={list(dcn)} is for {math.prod(dcn)} slices of TPUs and the devices are in '
        f'{slices}: its product must be {slices}'
      )
    make = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    blocks = [make(ici, granule) for granule in granules]
  else:
    blocks = [np.reshape(np.array(granule, dtype=object), ici) for granule in granules]
  # [dcn axes…, ici axes…] to [dcn 0, ici 0, dcn 1, ici 1, …]
  n = len(ici)
  stacked = np.reshape(np.stack(blocks), [*dcn, *ici])
  paired = stacked.transpose([i + j * n for i in range(n) for j in (0, 1)])
  return paired.reshape(mesh_shape(ici, dcn))


def _granules(devices: Sequence[Any], count: int) -> list[list[Any]]:
  """`count` groups of devices that are near each other: slices, or else processes, or parts."""
  ordered = sorted(devices, key=lambda d: (_slice(d), d.process_index, d.id))
  for key in (_slice, lambda d: d.process_index):
    groups: dict[int, list[Any]] = {}
    for d in ordered:
      groups.setdefault(key(d), []).append(d)
    if len(groups) == count and len({len(g) for g in groups.values()}) == 1:
      return [groups[k] for k in sorted(groups)]
  # a process a GPU, say: neighbours in the order of their processes share a host
  size = len(ordered) // count
  return [ordered[i * size : (i + 1) * size] for i in range(count)]


def _slice(device: Any) -> int:
  return getattr(device, 'slice_index', None) or 0


def mesh_shape(ici: Sequence[int], dcn: Sequence[int]) -> tuple[int, ...]:
  """Devices per axis; a `dcn` of ones is one of any length."""
  return tuple(i * d for i, d in zip(ici, _full(dcn, len(ici)), strict=True))


def _full(dcn: Sequence[int], axes: int) -> Sequence[int]:
  return [1] * axes if all(d == 1 for d in dcn) else dcn


def check_mesh_shape(
  ici: Sequence[int], dcn: Sequence[int], axes: Sequence[str], devices: int | None
) -> None:
  """Raises UserError unless both shapes fit `axes` and, if given, the number of devices."""
  unknown = [a for a in axes if a not in KNOWN_AXES]
  if unknown or len(set(axes)) < len(axes) or not set(MESH_AXES) <= set(axes):
    raise UserError(
      f'MESH_AXES={list(axes)} must hold {", ".join(MESH_AXES)} and may hold '
      f'{", ".join(a for a in KNOWN_AXES if a not in MESH_AXES)}, each once'
    )
  for name, shape in (('ICI_MESH_SHAPE', ici), ('DCN_MESH_SHAPE', _full(dcn, len(axes)))):
    if len(shape) != len(axes) or min(shape) < 1:
      raise UserError(
        f'{name}={list(shape)} must have {len(axes)} positive sizes, for {", ".join(axes)}'
      )
  product = math.prod(mesh_shape(ici, dcn))
  if devices is not None and product != devices:
    all_data = [devices if a == 'data' else 1 for a in axes]
    here = shell.flags({'ICI_MESH_SHAPE': all_data, 'DCN_MESH_SHAPE': [1] * len(axes)})
    raise UserError(
      f'ICI_MESH_SHAPE={list(ici)} × DCN_MESH_SHAPE={list(dcn)} asks for {product} devices and '
      f'{devices} {"is" if devices == 1 else "are"} present. To use what is here: {here}'
    )


@contextlib.contextmanager
def activate(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Iterator[None]:
  """Makes `shard` constrain arrays to `mesh` by `rules` while a program is traced."""
  token = _active.set((mesh, rules))
  try:
    yield
  finally:
    _active.reset(token)


def active_mesh() -> tuple[Mesh, Rules] | None:
  """What `activate` made active."""
  return _active.get()


def active_platform() -> str:
  """Of the active mesh's devices, or else of JAX's own: cpu, gpu, cuda, tpu."""
  active = active_mesh()
  return active[0].devices.flat[0].platform if active else jax.default_backend()


def shard(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains `x` to the layout that the active rules give its logical axes.

  A dimension that the mesh axes do not divide stays whole.

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
  partition = fitting(spec(names, rules), x.shape, dict(mesh.shape))
  if mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


# The logical axes of a weight that FSDP splits over the mesh axis data.
_FSDP_AXES = ('embed', 'expert_embed')


def gathers_weights() -> bool:
  """Whether `gather_weight` gathers on the active mesh: see there."""
  active = _active.get()
  if active is None:
    return False
  mesh, rules = active
  batch = axes_of(rules['batch'])
  sizes = dict(mesh.shape)
  before = math.prod(sizes[a] for a in batch[: batch.index('data')])
  return min(before, sizes['data'], sizes['mdl']) > 1


def gather_weight(w: jax.Array, names: Sequence[str | None]) -> jax.Array:
  """A weight for a product with activations, gathered over data where XLA must not choose.

  XLA's partitioner exchanges rows of the batch when it multiplies activations that are split by
  (replica, data) with a weight that is split by mdl in the dimension that is summed over and by
  data in the one that remains, if the result is split by mdl there, data and mdl have the same
  size, and a shard has fewer tokens than that dimension has entries. The rows of (replica 0,
  data 1) and (replica 1, data 0) change places before the product and not back after it. Programs
  for CPUs and for GPUs are wrong (jax 0.10 to 0.11), those for TPUs were not seen to be. With the
  weight gathered by hand the program needs one exchange less, and is otherwise the same.

  On meshes of which data is the first axis of the batch, or on which replica, data or mdl is 1,
  nothing is done, so that XLA may gather piece by piece while it multiplies.

  Args:
    w: The weight, in the dtype of the product.
    names: Its logical axes.
  """
  if not gathers_weights():
    return w
  whole = [None if name in _FSDP_AXES else name for name in names]

  @jax.custom_vjp
  def gather(w: jax.Array) -> jax.Array:
    return shard(w, *whole)

  # a constraint's own derivative would leave the gradient whole on every device
  gather.defvjp(lambda w: (shard(w, *whole), None), lambda _, grad: (shard(grad, *names),))
  return gather(w)


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

  Of several axes of one dimension, the first ones that do are kept.

  Args:
    partition: What the rules ask for.
    shape: The array's shape.
    sizes: Mesh axis sizes.
  """

  def one(entry, dim):
    axes = axes_of(entry)
    while dim % math.prod(sizes[a] for a in axes):
      axes = axes[:-1]
    return entry if axes == axes_of(entry) else axes or None

  entries = tuple(partition) + (None,) * (len(shape) - len(partition))
  return PartitionSpec(*(one(e, d) for e, d in zip(entries, shape, strict=True)))


def sharded_shapes(boxed_params: Any, mesh: Mesh, rules: Rules) -> Any:
  """jax.ShapeDtypeStructs of a tree of abstract parameters as `param` boxes them, on a mesh."""
  sizes = dict(mesh.shape)

  def one(x: jax.ShapeDtypeStruct, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, fitting(partition, x.shape, sizes))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(one, meta.unbox(boxed_params), param_specs(boxed_params, rules))


def batch_sharding(mesh: Mesh, rules: Rules, shape: Sequence[int] | None = None) -> NamedSharding:
  """The layout of a batch's arrays [batch, length]; what does not divide `shape` is left out."""
  partition = spec(('batch', 'length'), rules)
  if shape is not None:
    partition = fitting(partition, shape, dict(mesh.shape))
  return NamedSharding(mesh, partition)


def num_shards(sizes: Mapping[str, int], rules: Rules, name: str) -> int:
  """Parts that a logical axis is split into on a mesh of these sizes by axis."""
  return math.prod(sizes[a] for a in axes_of(rules[name]))


def param(
  module: nn.Module,
  name: str,
  init: Any,
  shape: Sequence[int],
  axes: Sequence[str | None],
  dtype: Any = 'float32',
) -> jax.Array:
  """Declares a parameter of `module` together with its logical axes."""
  if len(shape) != len(axes):
    raise ValueError(f'{name}: {len(axes)} axis names {axes} for shape {shape}')
  boxed_init: Any = nn.with_logical_partitioning(init, tuple(axes))
  return module.param(name, boxed_init, tuple(shape), dtype)


def process_rows(sharding: NamedSharding, batch_size: int) -> slice:
  """The rows of a global batch that the devices of this process hold."""
  rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
  indices = rows.addressable_devices_indices_map((batch_size,)).values()
  bounds = [index[0].indices(batch_size) for index in indices if index is not None]
  return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))
