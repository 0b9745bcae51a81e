"""The extension for context parallelism: attention of sequences split over devices."""

from paxlite.core.extension import Extension

_HERE = 'paxlite.context_parallelism'
_MOVED = 'context_attention', 'context_choice', 'halo_attention', 'ring_attention'
EXTENSION = Extension(
  'context_parallelism',
  hooks={
    'the mesh axis context': f'{_HERE}.context_attention:ContextAttention',
    'CONTEXT_ATTENTION': f'{_HERE}.checks:check',
  },
  former_modules={
    f'paxlite.layers.attention.{name}': f'{_HERE}.{name}' for name in (*_MOVED, 'ulysses_attention')
  },
)
