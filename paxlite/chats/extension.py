"""What chats add: nothing by themselves, but other leaves need them."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'chats',
  former_modules={
    f'paxlite.data.{name}': f'paxlite.chats.{name}' for name in ('conversations', 'sft_formats')
  },
)
