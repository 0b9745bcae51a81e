"""How arrays are sharded over the mesh.

Code names the logical axes of an array; one table of rules maps them to mesh axes:

    x_BTD = shard(x_BTD, 'batch', 'residual_length', 'act_embed')

The mesh has Pax's axes (replica, data, mdl), and others where a run asks for them:

    stage    splits the layers of a repeated stack (pipeline parallelism)
    replica  copies the model and splits the batch (DP)
    data     splits the batch and the weights (FSDP)
    expert   splits the batch, and experts (expert parallelism)
    context  splits the length of the activations (context parallelism)
    mdl      splits heads, hidden units and vocabulary (TP)
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from paxlite.core.errors import UserError, listed
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.parallel import devices
from paxlite.parallel.mesh import MESH_AXES
from paxlite.parallel.weight_dims import boxed

Rules = Mapping[str, str | tuple[str, ...] | None]

# Weights are split in two dimensions (data × mdl) and activations in batch and width, as in Pax.
ALL_RULES: Rules = {
  # activations
  'batch': ('replica', 'data', 'expert'),
  'outer_batch': ('replica', 'data', 'expert', 'stage'),  # of the final norm and the logits
  'row_shards': None,  # parts of the batch as a dimension: see pipeline/stage_rows.py
  # a device looks up its columns of a table for the tokens of all devices along data and context
  'lookup_batch': ('replica', 'expert'),
  'lookup_length': None,
  'lookup_embed': ('data', 'context'),
  'exchanged_embed': 'data',  # when each device along context has its own tokens again
  'length': 'context',
  'residual_length': 'context',  # of the activations between two layers
  'kv_length': None,  # a query needs the keys of its full sequence: gathered over context
  'act_embed': 'mdl',
  'act_heads': 'mdl',
  'act_kv_heads': 'mdl',
  'act_mlp': 'mdl',
  'act_vocab': 'mdl',
  # weights
  'embed': ('data', 'context'),
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
  # experts: see experiments.parts.experts
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


@contextlib.contextmanager
def activate(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Iterator[None]:
  """Makes `shard` constrain arrays to `mesh` by `rules` while a program is traced."""
  token = _active.set((mesh, rules))
  try:
    yield
  finally:
    _active.reset(token)


def active_mesh() -> tuple[Mesh, Rules] | None:
  """The mesh and the rules that `activate` made active."""
  return _active.get()


def active_platform() -> str:
  """The platform of the active mesh, or else JAX's default one: cpu, gpu, cuda, tpu."""
  active = active_mesh()
  return active[0].devices.flat[0].platform if active else jax.default_backend()


def active_kind() -> str:
  """The kind of the active platform: cpu, gpu, tpu."""
  return devices.kind(active_platform())


def adds_up_gradients() -> bool:
  """Whether a device sums the gradients of its own sequences and sends the sum once a step.

  The layers of a pipeline do, if all mesh axes that split rows are in `row_shards`.
  """
  active = active_mesh()
  if active is None or active[1]['row_shards'] is None:
    return False
  mesh, rules = active
  return all(num_shards(mesh.shape, rules, name) == 1 for name in ('batch', 'length'))


def shard(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains `x` to the layout that the active rules give its logical axes.

  A dimension is not sharded over mesh axes that do not divide it: see `fitting`. Raises ValueError
  if a name has no rule, or there are too many or too few names.

  Args:
    x: An array with as many dimensions as there are names.
    *names: Logical axis names; None for a dimension that is never split.
  """
  if len(names) != x.ndim:
    raise ValueError(f'{len(names)} axis names {names} for an array of shape {x.shape}')
  active = _active.get()
  if active is None:
    spec(names, DEFAULT_RULES)
    return x
  mesh, rules = active
  partition = spec_of(x, names, mesh, rules)
  if mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


# The logical axes of a weight that FSDP splits over the mesh axis data.
_FSDP_AXES = ('embed', 'expert_embed')


def gathers_weights() -> bool:
  """Whether `gather_weight` gathers on the active mesh."""
  active = _active.get()
  if active is None:
    return False
  mesh, rules = active
  batch = axes_of(rules['batch'])
  if 'data' not in batch:
    return False
  sizes = dict(mesh.shape)
  before = math.prod(sizes[a] for a in batch[: batch.index('data')])
  return min(before, sizes['data'], sizes['mdl']) > 1


def gather_weight(w: jax.Array, names: Sequence[str | None]) -> jax.Array:
  """Returns a weight for a product with activations, gathered over data where XLA must not choose.

  XLA's partitioner exchanges rows of the batch in such a product: The activations are split by
  (replica, data). The weight is split by mdl in the dimension that is summed over, and by data in
  the dimension that remains, in which the result is split by mdl. Data and mdl have the same size,
  and a shard has fewer tokens than the remaining dimension has entries. Then the rows of
  (replica 0, data 1) and of (replica 1, data 0) are swapped before the product and are not swapped
  back after it. Programs for CPUs and for GPUs are wrong (jax 0.10 to 0.12); no wrong program for
  TPUs was seen. With the weight gathered by hand, the program needs one exchange less and is
  otherwise the same.

  On meshes with data as the first axis of the batch, or with replica, data or mdl of size 1,
  nothing is done, so that XLA may gather piece by piece while it multiplies.

  Args:
    w: The weight, in the dtype of the product.
    names: The logical axes of the weight.
  """
  if not gathers_weights():
    return w
  whole = [None if name in _FSDP_AXES else name for name in names]

  @jax.custom_vjp
  def gather(w: jax.Array) -> jax.Array:
    return shard(w, *whole)

  # a constraint's own derivative would leave the gradient unsharded on every device
  gather.defvjp(lambda w: (shard(w, *whole), None), lambda _, grad: (shard(grad, *names),))
  return gather(w)


def spec(names: Sequence[str | None], rules: Rules) -> PartitionSpec:
  """The PartitionSpec of an array with these logical axes."""
  unknown = [n for n in names if n is not None and n not in rules]
  if unknown:
    raise ValueError(f'no sharding rule for the logical axes {unknown}; known: {sorted(rules)}')
  return PartitionSpec(*(None if n is None else rules[n] for n in names))


def param_specs(boxed_params: PyTree, rules: Rules) -> PyTree:
  """PartitionSpecs of parameters that `param` has boxed; UserError if an axis has no rule."""

  def one(path: KeyPath, leaf: object) -> PartitionSpec:
    if not isinstance(leaf, nn.LogicallyPartitioned):
      return PartitionSpec()
    try:
      return spec(leaf.names, rules)
    except ValueError as e:
      raise UserError(f'the variable {path_name(path)}: {e}') from None

  is_leaf = lambda x: isinstance(x, nn.LogicallyPartitioned)
  return jax.tree_util.tree_map_with_path(one, boxed_params, is_leaf=is_leaf)


def spec_of(x: jax.Array, names: Sequence[str | None], mesh: Mesh, rules: Rules) -> PartitionSpec:
  """Returns how an array with these logical axes is split over a mesh; see `fitting`."""
  return fitting(spec(names, rules), x.shape, dict(mesh.shape))


def fitting(
  partition: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
  """`partition` without the mesh axes that do not divide their dimension (a vocabulary of 50257).

  Where a dimension has several mesh axes, the first ones are kept as far as their product divides
  it.

  Args:
    partition: The PartitionSpec that the rules ask for.
    shape: The array's shape.
    sizes: The sizes of the mesh axes.
  """

  def one(entry: Any, dim: int) -> Any:
    axes = axes_of(entry)
    while dim % math.prod(sizes[a] for a in axes):
      axes = axes[:-1]
    return entry if axes == axes_of(entry) else axes or None

  entries = tuple(partition) + (None,) * (len(shape) - len(partition))
  return PartitionSpec(*(one(e, d) for e, d in zip(entries, shape, strict=True)))


def sharded_shapes(boxed_params: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
  """jax.ShapeDtypeStructs, sharded over a mesh, of abstract parameters that `param` has boxed."""
  sizes = dict(mesh.shape)

  def one(x: jax.ShapeDtypeStruct, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, fitting(partition, x.shape, sizes))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(one, meta.unbox(boxed_params), param_specs(boxed_params, rules))


HOST = 'pinned_host'  # JAX's name of the host's memory that a device reads and writes


def on_host(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Returns a sharded shape in the host memory of each device.

  Raises UserError if the devices cannot read the memory of their host.
  """
  sharding = like.sharding
  memories = [m.kind for m in sharding.mesh.devices.flat[0].addressable_memories()]
  if HOST in memories:
    there = sharding.with_memory_kind(HOST)
  elif memories:
    raise UserError(
      f'OFFLOAD_OPTIMIZER=True needs the memory {HOST}, but these devices have '
      f'{", ".join(memories)}: OFFLOAD_OPTIMIZER=False'
    )
  else:  # a device that is only described has no memories, and an abstract mesh has no devices
    mesh = sharding.mesh.abstract_mesh
    there = NamedSharding(mesh, sharding.spec, memory_kind=HOST)
  return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=there)


def is_on_host(like: jax.Array | jax.ShapeDtypeStruct) -> bool:
  """Whether an array, or a sharded shape, is in the memory of the host."""
  return like.sharding is not None and like.sharding.memory_kind == HOST


def bytes_per_device(tree: PyTree) -> int:
  """Returns the bytes of arrays, or of sharded shapes, on one device."""

  def one(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def batch_sharding(mesh: Mesh, rules: Rules, shape: Sequence[int] | None = None) -> NamedSharding:
  """The sharding of a batch's arrays [batch, length], over mesh axes that divide `shape`."""
  partition = spec(('batch', 'length'), rules)
  if shape is not None:
    partition = fitting(partition, shape, dict(mesh.shape))
  return NamedSharding(mesh, partition)


def num_shards(sizes: Mapping[str, int], rules: Rules, name: str) -> int:
  """The number of shards of a logical axis on a mesh with these axis sizes."""
  return math.prod(sizes[a] for a in axes_of(rules[name]))


def shards_of(name: str, size: int) -> int:
  """The number of shards of a dimension of this size and logical axis on the active mesh."""
  active = _active.get()
  if active is None:
    return 1
  mesh, rules = active
  sizes = dict(mesh.shape)
  (entry,) = fitting(spec([name], rules), [size], sizes)
  return math.prod(sizes[a] for a in axes_of(entry))


_declared_by = contextvars.ContextVar[Rules | None]('paxlite_declared_by', default=None)


@contextlib.contextmanager
def declared_by(rules: Rules) -> Iterator[None]:
  """A context in which `param` raises ValueError for an axis without a rule, at its own line."""
  token = _declared_by.set(rules)
  try:
    yield
  finally:
    _declared_by.reset(token)


def param(
  module: nn.Module,
  name: str,
  init: Callable[..., jax.Array],
  shape: Sequence[int],
  axes: Sequence[str | None],
  dtype: DTypeLike = 'float32',
  equation: str = '',
) -> jax.Array:
  """Declares a parameter of `module` together with its logical axes.

  A weight has the `equation` of its product with activations: see weight_dims. If the module has a
  variable of the same name in the collection PROBES, the parameter's gradient is that of this
  variable, and has its dtype.
  """
  if len(shape) != len(axes):
    raise ValueError(f'{name}: {len(axes)} axis names {axes} for shape {shape}')
  if (rules := _declared_by.get()) is not None:
    spec(axes, rules)
  value = module.param(name, boxed(init, axes, equation), tuple(shape), dtype, unbox=True)
  if not module.has_variable(PROBES, name):
    return value
  _probes_read.get().add('/'.join((*module.path, name)))
  return _probed(value, module.get_variable(PROBES, name))


# The gradient of an array has the array's dtype, and a loop over layers collects the gradients of
# all layers in it. A gradient probe is an array of another dtype that no one reads, so that it
# costs nothing; the cotangent of a parameter becomes that of its probe, layer by layer.
PROBES = 'gradient_probes'
_probes_read: contextvars.ContextVar[set[str]] = contextvars.ContextVar('paxlite_probes_read')


@contextlib.contextmanager
def reading_probes(names: Collection[str]) -> Iterator[None]:
  """Checks that a model which is traced reads the gradient probes of all these parameters.

  Raises UserError if a parameter is not declared by `param`, or no loss reads the model.
  """
  read: set[str] = set()
  outer = _probes_read.get(None)
  token = _probes_read.set(read)
  try:
    yield
  finally:
    _probes_read.reset(token)
    if outer is not None:
      outer |= read
  missing = sorted(set(names) - read)
  if missing and not read:
    raise UserError(
      "GRADIENT_DTYPE needs a loss that reads the model's outputs: GRADIENT_DTYPE=float32"
    )
  if missing:
    raise UserError(
      'GRADIENT_DTYPE needs parameters that paxlite.parallel.partitioning.param declares, but '
      f'{listed(missing, shown=3)} are declared otherwise: GRADIENT_DTYPE=float32'
    )


@jax.custom_vjp
def _probed(value: jax.Array, probe: jax.Array) -> jax.Array:
  return value


_probed.defvjp(
  lambda value, probe: (value, jnp.zeros(0, probe.dtype)),
  lambda like, gradient: (None, gradient.astype(like.dtype)),
)


def process_rows(sharding: NamedSharding, batch_size: int) -> slice:
  """The rows of a global batch that the devices of this process hold."""
  rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
  process = jax.process_index()
  found: Mapping[jax.Device, tuple[slice, ...]] = rows.devices_indices_map((batch_size,))
  bounds = [i[0].indices(batch_size) for d, i in found.items() if d.process_index == process]
  return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))
