"""The attribute that selects how attention is computed on a mesh with the axis context."""

from typing import TYPE_CHECKING

import fiddle as fdl

from paxlite.config.attribute_kinds import Run
from paxlite.core.errors import UserError
from paxlite.experiments.parts.attention import AttentionLayers
from paxlite.layers.attention import attention_kernels, context_choice
from paxlite.layers.attention.attention_kernel import ContextWay
from paxlite.parallel import devices

if TYPE_CHECKING:
  import jax


class ContextParallelism(AttentionLayers, subject='Attention'):
  """Attention of rows that are split over devices."""

  # gather: each device gets all keys. ring: keys travel from device to device, or those alone that
  # a window reaches. heads: devices exchange tokens for heads.
  CONTEXT_ATTENTION: Run[ContextWay] = (
    'auto'  # attention over the mesh axis context: all-gather, ring, or heads (Ulysses)
  )

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
    case = self.attention_case()
    if case.bias is not None or case.softmax.dropout is not None:
      raise UserError(
        f'{stated} supports neither dropout nor a relative bias: CONTEXT_ATTENTION=gather'
      )
    for window in self.windows:
      shapes = context_choice.shapes_of(self.attention_case(window))
      if way == 'ring' and not context_choice.has_ring(shapes):
        raise UserError(f'{stated} needs a MAX_SEQ_LEN that is divisible by 2 × {size}')
      if way == 'heads' and not context_choice.has_heads(shapes):
        raise UserError(
          f'{stated} needs NUM_HEADS={self.NUM_HEADS} and NUM_KV_HEADS={self.NUM_KV_HEADS} that '
          'context × mdl divides: CONTEXT_ATTENTION=ring'
        )

  @property
  def warnings(self) -> list[str]:
    if self.mesh_sizes.get('context', 1) == 1:  # `show` must not start devices that are in use
      return super().warnings
    return [*super().warnings, *self.attention_choices(devices.present()[0])]

  def attention_choices(self, device: 'jax.Device') -> list[str]:
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
      if size == 1:
        if reasons := attention_kernels.why_not_fused(case):
          name = attention_kernels.first(case).name
          found.append(f'Attention {what} is computed by {name}: {", ".join(reasons)}.')
        continue
      known = context_choice.estimates(context_choice.shapes_of(case))
      if not case.has_parts:
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
