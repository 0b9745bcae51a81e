"""Checks of an experiment with CONTEXT_ATTENTION."""

from paxlite.context_parallelism import context_choice
from paxlite.core.errors import UserError
from paxlite.experiments.parts.attention import AttentionLayers


def check(e: AttentionLayers) -> None:
  """Raises UserError if attention over the mesh axis context cannot be computed as requested."""
  size, way = e.mesh_sizes['context'], e.CONTEXT_ATTENTION
  if way not in ('ring', 'heads'):
    return
  stated = f'CONTEXT_ATTENTION={way} on a mesh with context = {size}'
  case = e.attention_case()
  if case.bias is not None or case.softmax.dropout is not None:
    raise UserError(
      f'{stated} supports neither dropout nor a relative bias: CONTEXT_ATTENTION=gather'
    )
  for window in e.windows:
    shapes = context_choice.shapes_of(e.attention_case(window))
    if way == 'ring' and not context_choice.has_ring(shapes):
      raise UserError(f'{stated} needs a MAX_SEQ_LEN that is divisible by 2 × {size}')
    if way == 'heads' and not context_choice.has_heads(shapes):
      raise UserError(
        f'{stated} needs NUM_HEADS={e.NUM_HEADS} and NUM_KV_HEADS={e.NUM_KV_HEADS} that '
        'context × mdl divides: CONTEXT_ATTENTION=ring'
      )
