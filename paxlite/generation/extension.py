"""What generation adds: its commands, and samples of a run."""

from paxlite.core.extension import Command, Extension

EXTENSION = Extension(
  'generation',
  needs=('chats',),
  commands=(
    Command('generate', 'continue a text', 'paxlite.tools.generate', 'Models'),
    Command('chat', 'talk with a model that was trained on chats', 'paxlite.tools.chat', 'Models'),
  ),
  callbacks=('paxlite.generation.samples:callbacks',),
)
