"""The attribute that selects how attention is computed on a mesh with the axis context."""

from typing import TYPE_CHECKING

import fiddle as fdl

from paxlite.core.attribute_kinds import Run
from paxlite.core.errors import UserError
from paxlite.experiments.attention import AttentionAndNorms
from paxlite.layers import context_choice, cudnn_attention
from paxlite.layers.attention_kernel import ContextWay
from paxlite.layers.context_choice import Shapes
from paxlite.layers.softmax_attention import Softmax
from paxlite.parallel import devices, partitioning

if TYPE_CHECKING:
  import jax


class ContextParallelism(AttentionAndNorms):
  """Attention of rows that are split over devices."""

  # gather: each device gets all keys. ring: keys travel from device to device, or those alone that
  # a window reaches. heads: devices exchange tokens for heads.
  CONTEXT_ATTENTION: Run[ContextWay] = 'auto'  # auto: the fastest way by an estimate from shapes

  @property
  def has_attention_bias(self) -> bool:
    """Whether the scores of attention get a bias, which needs all keys."""
    return False

  @property
  def has_fused_ring(self) -> bool:
    is_split = self.mesh_sizes.get('context', 1) > 1 and self.CONTEXT_ATTENTION in ('auto', 'ring')
    return is_split and self.has_fused_attention and not self.has_attention_bias

  def dot_product_attention(self) -> fdl.Partial:
    attention = super().dot_product_attention()
    attention.kernel_tpl.context = self.CONTEXT_ATTENTION
    return attention

  def validate(self) -> None:
    super().validate()
    size, way = self.mesh_sizes.get('context', 1), self.CONTEXT_ATTENTION
    if size == 1 or way not in ('ring', 'heads'):
      return
    stated = f'CONTEXT_ATTENTION={way} on a mesh with context = {size}'
    if self.DROPOUT_PROB or self.has_attention_bias:
      raise UserError(
        f'{stated} knows no dropout and no relative bias: --fdl.CONTEXT_ATTENTION=gather'
      )
    for window in self._windows:
      shapes = self._shapes(window, 'cpu')
      if way == 'ring' and not context_choice.has_ring(shapes):
        raise UserError(f'{stated} needs a MAX_SEQ_LEN that is divisible by 2 × {size}')
      if way == 'heads' and not context_choice.has_heads(shapes):
        raise UserError(
          f'{stated} needs NUM_HEADS={self.NUM_HEADS} and NUM_KV_HEADS={self.NUM_KV_HEADS} that '
          'context × mdl divides: --fdl.CONTEXT_ATTENTION=ring'
        )

  @property
  def remarks(self) -> list[str]:
    if self.mesh_sizes.get('context', 1) == 1:
      return super().remarks
    return [*super().remarks, *self.context_remarks(devices.present()[0])]

  def context_remarks(self, device: 'jax.Device') -> list[str]:
    """Returns a sentence for each kind of attention: how it is computed over context."""
    size = self.mesh_sizes.get('context', 1)
    if size == 1:
      return []
    found = []
    for window in self._windows:
      what = f'within {window:,} tokens' if window else 'to all tokens'
      known = context_choice.estimates(
        self._shapes(window, device.platform, cudnn_attention.capability_of(device))
      )
      if self.DROPOUT_PROB or self.has_attention_bias:
        known = {'gather': known['gather']}
      way = self.CONTEXT_ATTENTION
      if way == 'auto':
        way = context_choice.fastest(known)
      listed = ', '.join(
        f'{name} {e.seconds * 1e3:.2f} ms and {e.sent / 1e6:,.0f} MB sent'
        + (f' with {e.held / 2**30:.1f} GiB of scores or masks' if e.held > 1 << 30 else '')
        for name, e in known.items()
      )
      found.append(
        f'Attention {what}, over context {size}: {way}. Estimates of a layer forward: {listed}.'
      )
    return found

  @property
  def _windows(self) -> list[int]:
    """The windows of the kinds of attention that the model has; 0 means all tokens."""
    window = self.SLIDING_WINDOW if 0 < self.SLIDING_WINDOW < self.MAX_SEQ_LEN else 0
    kinds = self.ATTENTION_PATTERN or ['sliding']
    return sorted({window if kind == 'sliding' else 0 for kind in kinds})

  def _shapes(self, window: int, platform: str, capability: float = 0) -> Shapes:
    """Returns the shapes of the attention of one layer on one device."""
    heads = partitioning.num_shards(self.mesh_sizes, self.rules, 'act_heads')
    on_gpu = platform in ('gpu', 'cuda')
    plain = on_gpu and (self.ATTEN_LOGIT_CAP > 0 or self.FPROP_DTYPE == 'float32')
    size, width = self.mesh_sizes.get('context', 1), self.DIMS_PER_HEAD
    rows = max(self.batch_size // self.batch_shards // self.NUM_MICROBATCHES, 1)
    of_whole_rows = rows * self.MAX_SEQ_LEN * self.NUM_HEADS // heads // size * width
    softmax = Softmax(1.0, window=window, extra_logit=0.0 if self.USE_ATTENTION_SINKS else None)
    bounds = cudnn_attention.takes_bounds(of_whole_rows, softmax, capability)
    return Shapes(
      rows=rows,
      length=self.MAX_SEQ_LEN,
      heads=max(self.NUM_HEADS // heads, 1),
      kv_heads=max(self.NUM_KV_HEADS // heads, 1),
      width=width,
      size=size,
      window=window,
      masked_by_array=self.packed and on_gpu and not plain,
      max_segments=self.MAX_TEXTS_PER_ROW if bounds else 0,
      fused=self.USE_FLASH_ATTENTION and platform != 'cpu' and not plain,
      itemsize=4 if self.FPROP_DTYPE == 'float32' else 2,
    )
