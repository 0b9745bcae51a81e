"""The extension for chats, which only other leaves use."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'chats',
  former_modules={
    'paxlite.data.chat_format': 'paxlite.chats.chat_format',
    'paxlite.data.chat_template': 'paxlite.chats.chat_template',
    'paxlite.data.conversations': 'paxlite.chats.conversations',
    'paxlite.data.sft_formats': 'paxlite.chats.sft_formats',
    'paxlite.data.text_encoding': 'paxlite.chats.chat_encoding',
  },
)
