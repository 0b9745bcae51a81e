"""What a kernel of attention is: the cases that it is asked for, and the calls that it makes."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax

from paxlite.core.trees import ArrayOrShape
from paxlite.layers.partial_attention import PartKernel, extra_logits
from paxlite.layers.softmax_attention import Softmax, Visible
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'kv_length', 'act_kv_heads', None)
_SEGMENTS, _LOGITS = ('batch', 'length'), ('act_heads',)


@dataclasses.dataclass(frozen=True)
class Case:
  """An attention that is asked for, as far as kernels differ in what they compute.

  Attributes:
    q: Queries [B, T, N, H], or their shape: those of all devices, or of one if `over_context`.
    k: Keys [B, S, K, H].
    v: Values [B, S, K, any width].
    softmax: The scale, the cap, the window, the extra logit and the dropout.
    is_packed: Whether rows have segments.
    has_bias: Whether the scores get a bias.
    fused: Whether fused kernels may compute it.
    block_size: Queries per block for kernels without a fused program, and keys per block where
      rows are split over context; 0 chooses a size.
    max_segments: The most segments of a packed row, padding included; 0 means any number.
    platform: The kind of the devices: cpu, gpu, tpu.
    capability: The compute capability of NVIDIA GPUs, 9.0 for Hopper; 0 on other devices.
    sizes: The sizes of the mesh axes.
    rules: The mesh axes of the logical axes.
    over_context: Whether it is a part of attention whose rows are split over devices: what one
      device computes after it has got the keys that it needs, or some of them.
  """

  q: ArrayOrShape
  k: ArrayOrShape
  v: ArrayOrShape
  softmax: Softmax
  is_packed: bool = False
  has_bias: bool = False
  fused: bool = True
  block_size: int = 0
  max_segments: int = 0
  platform: str = dataclasses.field(default_factory=lambda: partitioning.active_kind())
  capability: float = dataclasses.field(default_factory=lambda: partitioning.active_capability())
  sizes: Mapping[str, int] = dataclasses.field(
    default_factory=lambda: partitioning.active_axes()[0]
  )
  rules: partitioning.Rules = dataclasses.field(
    default_factory=lambda: partitioning.active_axes()[1]
  )
  over_context: bool = False

  def shards(self, axis: str) -> int:
    """Returns over how many devices the mesh splits a logical axis."""
    return partitioning.num_shards(self.sizes, self.rules, axis)

  def of_one_device(self) -> 'Case':
    """Returns the rows and heads of one device, with all of their tokens."""
    rows = self.q.shape[0] // partitioning.fitting_shards(
      self.sizes, self.rules, 'batch', self.q.shape[0]
    )
    heads = self.shards('act_heads')
    of = lambda x: jax.ShapeDtypeStruct(
      (rows, x.shape[1], max(x.shape[2] // heads, 1), x.shape[3]), x.dtype
    )
    return dataclasses.replace(self, q=of(self.q), k=of(self.k), v=of(self.v), over_context=True)


class Call(NamedTuple):
  """A call of a kernel in a traced or a compiled program.

  Attributes:
    name: The primitive or the target, and the name of the kernel.
    text: What the program says of it: its configuration, and the scopes that it comes from.
    operands: The shapes of its operands of floating point with 3 or more dimensions, in turn.
  """

  name: str
  text: str
  operands: list[tuple[int, ...]]


class Kernel:
  """Computes attention where XLA splits it over devices, if they are several.

  Attributes:
    name: Its name in a sentence.
    is_fused: Whether USE_FLASH_ATTENTION=False leaves it out.
    platform: The only kind of device that it is for, as cpu, gpu or tpu; None means any.
    primitives: Finds its calls by their names; None if it consists of XLA's own operations.
    kept: Finds those whose results a backward pass reads, for policies that keep them.
  """

  name: str
  is_fused: bool = True
  platform: str | None = None
  primitives: re.Pattern[str] | None = None
  kept: re.Pattern[str] | None = None

  def refusal(self, case: Case) -> str | None:
    """Returns why the kernel does not compute a case, to follow its name; None if it does."""
    raise NotImplementedError

  def attend(
    self,
    case: Case,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    visible: Visible,
    bias_JNTS: jax.Array | None,
  ) -> jax.Array:
    """Returns the context [B, T, N, H], for arguments as those of DotProductAttention.

    Args:
      case: What is asked for, with the same arrays.
      q_BTNH: Queries.
      k_BSKH: Keys; N / K neighboring query heads share a key head.
      v_BSKH: Values.
      visible: The keys that a query sees, with the window.
      bias_JNTS: Is added to the capped scores, for J groups of neighboring rows; None adds nothing.
    """
    raise NotImplementedError

  def flops(self, call: Call) -> float:
    """Returns the FLOPs of one of its calls; 0 where the program itself states them."""
    del call
    return 0.0


class LocalKernel(Kernel):
  """Computes causal attention of one device's rows and heads, in a shard_map.

  This is for kernels that XLA cannot split over devices. They also compute rows that are split over
  context.
  """

  def refusal(self, case: Case) -> str | None:
    own_keys = all(x.shape[2] % case.shards('act_heads') == 0 for x in (case.q, case.k))
    is_local = case.over_context or (case.shards('length') == 1 and own_keys)
    return first_of({
      'knows no bias': case.has_bias,
      'knows no dropout of attention': case.softmax.dropout is not None,
      'takes as many keys as queries': case.q.shape[1] != case.k.shape[1],
      'needs whole rows, and the keys of its heads, on each device': not is_local,
      **self.reasons(case),
    })  # fmt: skip

  def reasons(self, case: Case) -> dict[str, bool]:
    """Returns further reasons to refuse a case, and whether each holds."""
    raise NotImplementedError

  def attend(
    self,
    case: Case,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    visible: Visible,
    bias_JNTS: jax.Array | None,
  ) -> jax.Array:
    del bias_JNTS
    ids_BT = None if visible.segments is None else visible.segments[0]
    arrays = q_BTNH, k_BSKH, v_BSKH, ids_BT, extra_logits(case.softmax, q_BTNH.shape[2])
    local = functools.partial(self.attend_locally, case)
    active = partitioning.active_mesh()
    if active is None:
      return local(*arrays)
    mesh, rules = active
    specs = tuple(
      None if x is None else partitioning.spec_of(x, names, mesh, rules)
      for names, x in zip((_Q, _KV, _KV, _SEGMENTS, _LOGITS), arrays, strict=True)
    )
    # a compiled step with calls of cuDNN can be saved only if the calls are in a shard_map
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return sharded(*arrays)

  def attend_locally(
    self,
    case: Case,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
  ) -> jax.Array:
    """Returns the context of one device's rows and heads, [B, T, N, H].

    Args:
      case: What is asked for; its arrays may be those of all devices.
      q_BTNH: Queries.
      k_BTKH: Keys.
      v_BTKH: Values.
      segment_ids_BT: Segments of queries and keys; None where there are none.
      logit_N: The extra logit of each head, in place of that of the case; None means none.
    """
    raise NotImplementedError

  def parts(self, case: Case) -> PartKernel | None:
    """Returns the kernel for parts of the keys, without a window and an extra logit; or None."""
    del case
    return None

  def masks_by_array(self, case: Case) -> bool:
    """Returns whether segments become an array [B, T, S]."""
    del case
    return False

  def bounds(self, case: Case) -> int:
    """Returns `max_segments` if whole rows have bounds of segments instead of that array; else 0.

    Args:
      case: The arrays of one device.
    """
    del case
    return 0


def call_name(primitive: str, params: Mapping[str, object]) -> str:
  """Returns the name of a traced operation as Call has it."""
  keys = {'ffi_call': ['target_name'], 'pallas_call': ['name', 'name_and_src_info']}
  named = (params.get(key) for key in keys.get(primitive, []))
  return ' '.join([primitive, *(str(name) for name in named if name)])


def first_of(reasons: Mapping[str, bool]) -> str | None:
  """Returns the first reason that holds; None if none does."""
  return next((reason for reason, holds in reasons.items() if holds), None)
