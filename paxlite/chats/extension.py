"""What chats add: nothing by themselves, but other leaves need them."""

from paxlite.core.extension import Extension

EXTENSION = Extension('chats')
