"""Attention layers: their attributes and their templates."""

import math
from typing import Any, Literal

import fiddle as fdl
import jax

from paxlite import extensions
from paxlite.config.attribute_kinds import (
  Count,
  Function,
  NotNegativeInt,
  OffAtZeroInt,
  Run,
  Shape,
  Training,
)
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.parts.positions import Positions
from paxlite.experiments.parts.width_and_norms import WidthAndNorms
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention import (
  Attention,
  CombinedQkv,
  DotProductAttention,
  FullWidthNorm,
  PerDimScale,
  SeparateQkv,
)
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import AttentionKernel, ContextWay
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.parallel import devices, partitioning

AttentionKind = str  # models have kinds of their own: see state_kinds and chunk_kinds
_SLIDING: set[AttentionKind] = {'sliding', 'sliding_nope'}  # those that see a window
QkNorm = Literal['none', 'per_head', 'all_heads']


class AttentionLayers(WidthAndNorms, Positions, subject='Attention'):
  """Attention layers, with the defaults of Pax's base class of language models."""

  NUM_HEADS: Shape[Count] = 16  # query heads
  HEADS_SPAN_MODEL: Training[bool] = True  # requires NUM_HEADS × DIMS_PER_HEAD = MODEL_DIMS
  # Blocks save memory and half of the work. MAX_SEQ_LEN: all queries at a time. 0: all, but on CPUs
  # a quarter if the sequence has 512 tokens or more. Where the mesh axis context splits sequences,
  # it is the most keys of a block instead.
  ATTENTION_BLOCK_SIZE: Run[int] = 0  # queries per attention block; 0: the kernel's choice
  USE_FLASH_ATTENTION: Run[bool] = True  # fused attention kernels where they exist
  # gather: each device gets all keys. ring: keys travel from device to device, or those alone that
  # a window reaches. heads: devices exchange tokens for heads.
  CONTEXT_ATTENTION: Run[ContextWay] = (
    'auto'  # attention over the context axis: all-gather, ring, or heads (Ulysses)
  )
  # GPUs from Hopper on skip the scores between the segments of a packed sequence. None: sequences
  # with more segments than usual are computed with a mask instead. A number saves the program for
  # those, and a sequence with more segments is refused. 0: a mask for all.
  MAX_SEGMENTS_PER_SEQ: Run[OffAtZeroInt | None] = (
    None  # maximum segments of a packed sequence, including padding; None: unknown
  )
  SLIDING_WINDOW: Function[NotNegativeInt] = 0  # tokens that a query attends to; 0: all previous
  # Kinds of attention, from the first block on and again from the start: 'sliding' (in the window),
  # 'full', the same without rotary positions ('sliding_nope', 'full_nope'), and what few models
  # have: kinds with a state instead of keys in hybrid models, such as 'mamba2'.
  ATTENTION_PATTERN: Function[
    list[AttentionKind]
  ] = []  # attention kinds of the blocks, repeated over the layers; []: all alike
  QK_NORM: Shape[QkNorm] = 'none'  # query and key norm, per head or over the full width
  ATTEN_LOGIT_CAP: Function[float] = 50.0  # soft cap of attention scores; ≤ 0: off
  USE_PER_DIM_SCALE: Shape[bool] = False  # learned scale per query dimension

  @property
  def DIMS_PER_HEAD(self) -> Shape[Count]:
    """Attention head width."""
    return self.MODEL_DIMS // self.NUM_HEADS

  @property
  def NUM_KV_HEADS(self) -> Shape[Count]:
    """Key-value heads; each serves a group of query heads."""
    return self.NUM_HEADS

  @property
  def attention_scale(self) -> float:
    """The factor of the scores of attention."""
    return 1 / math.sqrt(self.DIMS_PER_HEAD)

  @property
  def head_widths(self) -> tuple[int, int]:
    """The widths of keys and of values."""
    return self.DIMS_PER_HEAD, self.DIMS_PER_HEAD

  def attention_case(self, window: int = 0, platform: str = 'cpu', capability: float = 0.0) -> Case:
    """Returns what one layer asks of the kernels of attention on such devices; 0: no window."""
    rows = max(self.batch_size // self.NUM_MICROBATCHES, 1)
    array = lambda heads, width: jax.ShapeDtypeStruct(
      (rows, self.MAX_SEQ_LEN, heads, width), self.FPROP_DTYPE
    )
    groups = partitioning.num_shards(self.mesh_sizes, self.rules, 'batch')
    scores = groups, self.NUM_HEADS, self.MAX_SEQ_LEN, self.MAX_SEQ_LEN
    bias = jax.ShapeDtypeStruct(scores, self.FPROP_DTYPE)
    segments: Any = 2 * (jax.ShapeDtypeStruct((rows, self.MAX_SEQ_LEN), 'int32'),)
    (of_keys, of_values), attention = self.head_widths, self.attention()
    # an author's own attention may have no such template, or one without these fields
    template_of: Any = getattr(attention, 'attention_tpl', None)

    def asked(name: str, value: Any) -> Any:
      return getattr(template_of, name, value)

    softmax = Softmax(
      asked('query_scale', self.attention_scale), asked('logit_cap', self.ATTEN_LOGIT_CAP), window,
      asked('sink_logit', None) if asked('sinks_tpl', None) is None else 0.0,
      (lambda weights: weights) if asked('dropout', self.DROPOUT_PROB) else None,
    )  # fmt: skip
    return Case(
      array(self.NUM_HEADS, of_keys), array(self.NUM_KV_HEADS, of_keys),
      array(self.NUM_KV_HEADS, of_values), softmax,
      AttentionMask(window=window, segments=segments if self.packed else None),
      None if asked('relative_bias_tpl', None) is None else bias, fused=self.USE_FLASH_ATTENTION,
      block_size=self.ATTENTION_BLOCK_SIZE, max_segments=self.MAX_SEGMENTS_PER_SEQ,
      platform=devices.kind(platform), capability=capability, sizes=self.mesh_sizes,
      rules=self.rules,
    )  # fmt: skip

  @property
  def windows(self) -> list[int]:
    """The windows of the kinds of attention that the model has; 0 means all tokens."""
    window = self.SLIDING_WINDOW if 0 < self.SLIDING_WINDOW < self.MAX_SEQ_LEN else 0
    kinds = set(self.ATTENTION_PATTERN or ['sliding']) - self.state_kinds
    return sorted({window if kind in _SLIDING else 0 for kind in kinds})

  @property
  def state_kinds(self) -> set[AttentionKind]:
    """The kinds of attention that the model may have, and that have a state instead of keys."""
    return set()

  @property
  def chunk_kinds(self) -> set[AttentionKind]:
    """The kinds of attention that the model may have, and that see a chunk of the text alone."""
    return set()

  @property
  def max_segments_per_seq(self) -> int:
    return self.MAX_SEGMENTS_PER_SEQ or 0

  @property
  def USE_QKV_BIAS(self) -> Shape[bool]:
    """Query, key and value biases."""
    return self.USE_BIAS

  @property
  def rotary_dims(self) -> int:
    return self.DIMS_PER_HEAD

  def validate(self) -> None:
    super().validate()
    heads = f'NUM_HEADS={self.NUM_HEADS} × DIMS_PER_HEAD={self.DIMS_PER_HEAD}'
    if self.HEADS_SPAN_MODEL and self.NUM_HEADS * self.DIMS_PER_HEAD != self.MODEL_DIMS:
      raise UserError(
        f'{heads} is {self.NUM_HEADS * self.DIMS_PER_HEAD}, not MODEL_DIMS={self.MODEL_DIMS}. '
        'If you want this: HEADS_SPAN_MODEL=False'
      )
    if self.NUM_HEADS % self.NUM_KV_HEADS:
      raise UserError(
        f'NUM_HEADS={self.NUM_HEADS} is not divisible by NUM_KV_HEADS={self.NUM_KV_HEADS}'
      )
    if self.MAX_SEGMENTS_PER_SEQ == 1:
      raise UserError(
        'MAX_SEGMENTS_PER_SEQ=1 leaves no room for padding: 2 or more, 0 for a mask, or None'
      )
    block = self.ATTENTION_BLOCK_SIZE
    if block < 0 or (block and self.MAX_SEQ_LEN % block):
      raise UserError(
        f'ATTENTION_BLOCK_SIZE={block} must divide MAX_SEQ_LEN={self.MAX_SEQ_LEN}, or be 0'
      )
    known = {*_SLIDING, 'full', 'full_nope', *self.chunk_kinds, *self.state_kinds}
    if unknown := [kind for kind in self.ATTENTION_PATTERN if kind not in known]:
      raise UserError(
        f'ATTENTION_PATTERN has {unknown[0]!r}, and {type(self).__name__} has only '
        f'{", ".join(sorted(known))}: derive it from a hybrid model, such as Qwen3Next'
      )
    if (local := _SLIDING & {*self.ATTENTION_PATTERN}) and self.SLIDING_WINDOW <= 0:
      raise UserError(f'ATTENTION_PATTERN has {min(local)!r}, which needs a SLIDING_WINDOW above 0')
    if self.mesh_sizes.get('context', 1) > 1:
      extensions.hook('CONTEXT_ATTENTION')(self)

  @property
  def warnings(self) -> list[str]:
    if self.mesh_sizes.get('context', 1) == 1:  # `show` must not start devices that are in use
      return super().warnings
    return [*super().warnings, *self.attention_choices(devices.present()[0])]

  def attention_choices(self, device: jax.Device) -> list[str]:
    """Returns for each kind of attention why no fused kernel computes it, or its way over context.

    Kernels for other kinds of devices are not mentioned.
    """
    asked = getattr(self.attention(), 'attention_tpl', None)
    if getattr(asked, 'kernel_tpl', None) is None:  # an author's own attention asks no kernel
      return []
    size = self.mesh_sizes.get('context', 1)
    found = []
    for window in self.windows:
      what = f'within {window:,} tokens' if window else 'to all tokens'
      case = self.attention_case(window, device.platform, devices.capability(device))
      if size > 1:
        way = extensions.hook('the mesh axis context')(case, self.CONTEXT_ATTENTION).described()
        found.append(f'Attention {what}, over context {size}: {way}')
      elif reasons := attention_kernels.why_not_fused(case):
        name = attention_kernels.first(case).name
        found.append(f'Attention {what} is computed by {name}: {", ".join(reasons)}.')
    return found

  def attention(self) -> fdl.Partial:
    """Returns the template of the attention layer."""
    sizes: dict[str, object] = dict(
      model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS, head_dim=self.DIMS_PER_HEAD
    )
    if self.NUM_KV_HEADS == self.NUM_HEADS:
      qkv = template(CombinedQkv, **sizes)
    else:
      qkv = template(SeparateQkv, num_kv_heads=self.NUM_KV_HEADS, **sizes)
    fields: dict[str, object] = dict(
      qkv_tpl=qkv,
      qk_norm_tpl=self.qk_norm(),
      query_scale_tpl=template(PerDimScale) if self.USE_PER_DIM_SCALE else None,
      rotary_tpl=self.rotary() if self.USE_ROTARY_POSITION_EMB else None,
      attention_tpl=self.dot_product_attention(),
    )
    return template(Attention, **fields | sizes | self.further_steps())

  def further_steps(self) -> dict[str, fdl.Partial | None]:
    """Returns fields of Attention in which a model differs from others; parts add theirs."""
    return {}

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    """Returns the template of attention of one of `state_kinds`."""
    raise ValueError(kind)

  def qk_norm(self) -> fdl.Partial | None:
    """Returns the template of the norms of queries and keys, or None."""
    if self.QK_NORM == 'none':
      return None
    if self.QK_NORM == 'per_head':
      return self.norm()
    return template(FullWidthNorm, norm_tpl=self.norm())

  def dot_product_attention(self) -> fdl.Partial:
    """Returns the template of the attention itself, without its projections."""
    return template(
      DotProductAttention,
      query_scale=self.attention_scale,
      logit_cap=self.ATTEN_LOGIT_CAP,
      window=self.SLIDING_WINDOW,
      dropout=self.DROPOUT_PROB,
      kernel_tpl=template(
        AttentionKernel, block_size=self.ATTENTION_BLOCK_SIZE, fused=self.USE_FLASH_ATTENTION,
        max_segments=self.MAX_SEGMENTS_PER_SEQ, context=self.CONTEXT_ATTENTION,
      ),
    )  # fmt: skip

  @property
  def attention_params(self) -> int:
    """The number of parameters in the matrix multiplications of one attention layer."""
    return 2 * self.MODEL_DIMS * self.DIMS_PER_HEAD * (self.NUM_HEADS + self.NUM_KV_HEADS)

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    """Returns the same of a kind of attention."""
    return self.attention_params

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """Returns a layer's training FLOPs per token, besides its weights'.

    They are 12 · N·H·S, where S is the mean number of keys that a query sees: T / 2, or less with a
    sliding window.
    """
    is_local = (kind is None or kind in _SLIDING) and self.SLIDING_WINDOW > 0
    window = min(self.SLIDING_WINDOW if is_local else self.MAX_SEQ_LEN, self.MAX_SEQ_LEN)
    return 12.0 * self.attention_dims * (window - window**2 / (2 * self.MAX_SEQ_LEN))

  @property
  def attention_dims(self) -> float:
    """Dimensions of scores and values of a query: the mean of the two, over all heads."""
    return self.NUM_HEADS * self.DIMS_PER_HEAD
