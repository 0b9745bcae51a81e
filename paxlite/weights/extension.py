"""What weights of others add: the commands that read and write them."""

from paxlite.core.extension import Command, Extension

EXTENSION = Extension(
  'weights',
  needs=('chats',),
  commands=(
    Command(
      'import',
      'read weights of Hugging Face, Meta or Pax',
      'paxlite.tools.import_weights',
      'Models',
    ),
    Command(
      'export',
      'write weights for Hugging Face or llama.cpp',
      'paxlite.tools.export_weights',
      'Models',
    ),
  ),
)
