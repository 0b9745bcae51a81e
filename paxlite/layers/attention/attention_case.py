"""The interface of an attention kernel: the cases that it supports, and its calls."""

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, cast

import jax

from paxlite.core.trees import ArrayOrShape
from paxlite.layers.attention.cache_encoding import EncodedVectors
from paxlite.layers.attention.paged_vectors import PagedVectors
from paxlite.layers.attention.partial_attention import QKV, PartialKernel, sink_logits
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.parallel import devices, partitioning


def active_capability() -> float:
  """Returns the compute capability of the active mesh's devices, or else of JAX's first one."""
  active = partitioning.active_mesh()
  return devices.capability(active[0].devices.flat[0] if active else jax.devices()[0])


def _active_axes() -> tuple[Mapping[str, int], partitioning.Rules]:
  """Returns the sizes of the axes of the active mesh, which are 1 without a mesh, and its rules."""
  active = partitioning.active_mesh()
  if active is None:
    return dict.fromkeys(partitioning.MESH_AXES, 1), partitioning.DEFAULT_RULES
  return dict(active[0].shape), active[1]


@dataclasses.dataclass(frozen=True)
class Case:
  """A requested attention, with its arrays or their shapes."""

  q: ArrayOrShape  # queries [B, T, N, H]: those of all devices, or of one if `over_context`
  # keys [B, S, K, H]; N / K neighboring query heads share a key head
  k: 'ArrayOrShape | EncodedVectors | PagedVectors'
  v: 'ArrayOrShape | EncodedVectors | PagedVectors'  # values [B, S, K, any width]
  softmax: Softmax  # the scale, the cap, the window, the attention sink and the dropout
  # the keys that a query sees
  visible: AttentionMask = dataclasses.field(default_factory=AttentionMask)
  # is added to the capped scores, [J, N, T, S] for J groups of neighboring rows; or None
  bias: 'ArrayOrShape | None' = None
  fused: bool = True  # whether fused kernels may compute it
  block_size: int = 0  # queries per block of plain XLA, or keys over context; 0 chooses a size
  # the most segments of a packed row, padding included; 0 means any number, which a kernel gets as
  # a bias; None means that the device counts them
  max_segments: int | None = 0
  # the kind of the devices: cpu, gpu, tpu
  platform: str = dataclasses.field(default_factory=lambda: partitioning.active_kind())
  # the compute capability of NVIDIA GPUs, 9.0 for Hopper; 0 on other devices
  capability: float = dataclasses.field(default_factory=lambda: active_capability())
  # the sizes of the mesh axes
  sizes: Mapping[str, int] = dataclasses.field(default_factory=lambda: _active_axes()[0])
  # the mesh axes of the logical axes
  rules: partitioning.Rules = dataclasses.field(default_factory=lambda: _active_axes()[1])
  # whether it is what one device computes of rows that are split over devices
  over_context: bool = False

  @property
  def arrays(self) -> QKV:
    """The queries, keys and values of a case that is computed."""
    return cast('QKV', (self.q, self.k, self.v))

  @property
  def is_packed(self) -> bool:
    """Whether rows have segments."""
    return self.visible.segments is not None

  @property
  def has_parts(self) -> bool:
    """Whether devices may compute whole rows of their heads, or parts of them, each for itself."""
    return self.bias is None and self.softmax.dropout is None and self.has_whole_heads

  @property
  def has_whole_heads(self) -> bool:
    """Whether the keys are those of the queries, and devices have whole heads of both."""
    heads = self.shards('act_heads')
    fits = self.q.shape[2] % heads == self.k.shape[2] % heads == 0
    return self.q.shape[1] == self.k.shape[1] and self.visible.is_from_first and fits

  def shards(self, axis: str) -> int:
    """Returns over how many devices the mesh splits a logical axis."""
    return partitioning.num_shards(self.sizes, self.rules, axis)

  def of_one_device(self) -> 'Case':
    """Returns the shapes of the rows and heads of one device, with all of their tokens."""
    B, heads = self.q.shape[0], self.shards('act_heads')
    fitting = partitioning.fitting(partitioning.spec(['batch'], self.rules), [B], self.sizes)
    rows = B // math.prod(self.sizes[a] for a in partitioning.axes_of(fitting[0]))
    of = lambda x: jax.ShapeDtypeStruct(
      (rows, x.shape[1], max(x.shape[2] // heads, 1), x.shape[3]), x.dtype
    )
    return dataclasses.replace(self, q=of(self.q), k=of(self.k), v=of(self.v), over_context=True)

  def with_arrays(
    self,
    qkv: Iterable[ArrayOrShape],
    ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
    bias_JNTS: jax.Array | None = None,
    over_context: bool = False,
  ) -> 'Case':
    """Returns the case of one device's arrays, segments, attention sinks and bias."""
    visible = AttentionMask(0, self.visible.window, None if ids_BT is None else (ids_BT, ids_BT))
    softmax = dataclasses.replace(self.softmax, sink_logit=logit_N)
    q, k, v = qkv
    return dataclasses.replace(
      self, q=q, k=k, v=v, visible=visible, softmax=softmax, bias=bias_JNTS,
      over_context=over_context,
    )  # fmt: skip

  def on_devices(self, local: Callable[..., jax.Array], keys: str = 'kv_length') -> jax.Array:
    """Returns the context by a function of the arrays of one device, as with_arrays gets them.

    Args:
      local: Returns the context of this device's queries.
      keys: The logical axis of the tokens of keys.
    """
    ids_BT = self.visible.segments[0] if self.visible.segments else None
    bias = cast('jax.Array | None', self.bias)
    arrays = *self.arrays, ids_BT, sink_logits(self.softmax, self.q.shape[2]), bias
    active = partitioning.active_mesh()
    if active is None:
      return local(*arrays)
    mesh, rules = active
    of_q, of_kv = ('batch', 'length', 'act_heads', None), ('batch', keys, 'act_kv_heads', None)
    of_bias = 'batch', 'act_heads', 'length', None
    names = of_q, of_kv, of_kv, ('batch', 'length'), ('act_heads',), of_bias
    specs = tuple(
      None if x is None else partitioning.spec_of(x, axes, mesh, rules)
      for axes, x in zip(names, arrays, strict=True)
    )
    # a compiled step with calls of cuDNN can be saved only if the calls are in a shard_map
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return sharded(*arrays)


class KernelCall(NamedTuple):
  """A call of a kernel in a traced or a compiled program."""

  name: str  # the primitive or the target, and the name of the kernel
  text: str  # what the program says of it: its configuration, and the scopes that it comes from
  # the shapes of its operands of floating point with 3 or more dimensions, in turn
  operands: list[tuple[int, ...]]


class Kernel(abc.ABC):
  """Computes attention where XLA splits it over devices, if they are several."""

  name: str  # its name in a sentence
  reads_encoded: bool = False  # whether it takes keys and values of an 8-bit cache
  reads_pages: bool = False  # whether it takes keys and values in pages
  is_fused: bool = True  # whether USE_FLASH_ATTENTION=False leaves it out
  # the only kind of device that it is for, as cpu, gpu or tpu; None means any
  platform: str | None = None
  # finds its calls by their names; None if it consists of XLA's own operations
  primitives: re.Pattern[str] | None = None
  # finds those whose results a backward pass reads, for policies that keep them
  kept: re.Pattern[str] | None = None

  @abc.abstractmethod
  def refusal(self, case: Case) -> str | None:
    """Returns why the kernel does not compute a case, to follow its name; None if it does."""

  @abc.abstractmethod
  def attend(self, case: Case) -> jax.Array:
    """Returns the context [B, T, N, width of a value]."""

  def flops(self, call: KernelCall) -> float:
    """Returns the FLOPs of one of its calls; 0 where the program itself states them."""
    del call
    return 0.0

  def peak_share(self, call: KernelCall) -> float | None:
    """Returns the share of the device's peak FLOP/s that a call reaches; None if not measured."""
    del call
    return None


class LocalKernel(Kernel):
  """Computes causal attention of one device's rows and heads, in a shard_map.

  This is for kernels that XLA cannot split over devices. They also compute rows that are split over
  context.
  """

  knows_bias: bool = False  # whether it adds a bias to the scores, [1, N, T, S] on a device

  def refusal(self, case: Case) -> str | None:
    reasons = {
      'knows no bias': case.bias is not None and not self.knows_bias,
      'knows no dropout of attention': case.softmax.dropout is not None,
      'needs whole sequences, and the keys of its heads, on each device': not (
        case.over_context or (case.has_whole_heads and case.shards('length') == 1)
      ),
      **self.reasons(case),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)

  @abc.abstractmethod
  def reasons(self, case: Case) -> dict[str, bool]:
    """Returns further reasons to refuse a case, and whether each holds."""

  def attend(self, case: Case) -> jax.Array:
    return case.on_devices(
      lambda q, k, v, *others: self.attend_locally(case.with_arrays((q, k, v), *others))
    )

  @abc.abstractmethod
  def attend_locally(self, case: Case) -> jax.Array:
    """Returns the context of one device's arrays; attention sinks are [N], or None."""

  def parts(self, case: Case) -> PartialKernel | None:
    """Returns the kernel for parts of the keys, without a window and an attention sink; or None."""
    del case
    return None

  def masks_by_array(self, case: Case) -> bool:
    """Returns whether segments become an array [B, T, S]."""
    del case
    return False

  def bounds(self, case: Case) -> int:
    """Returns how many segments of a row have bounds in place of that array; 0 if none have."""
    del case
    return 0


def call_name(primitive: str, params: Mapping[str, object]) -> str:
  """Returns the name of a traced operation as KernelCall has it."""
  keys = {'ffi_call': ['target_name'], 'pallas_call': ['name', 'name_and_src_info']}
  named = (params.get(key) for key in keys.get(primitive, []))
  return ' '.join([primitive, *(str(name) for name in named if name)])
