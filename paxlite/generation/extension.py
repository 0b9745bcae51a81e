"""The extension for generation: its commands, and samples of a run."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str) -> Command:
  return Command(name, purpose, f'paxlite.generation.commands.{name}', 'Models')


EXTENSION = Extension(
  'generation',
  needs=('chats', 'quantization'),
  commands=(_command('generate', 'continue a text'), _command('chat', 'chat with a model')),
  callbacks=('paxlite.generation.samples:callbacks',),
  hooks={'TrainedModel.inference': 'paxlite.generation.inference:load_checkpoint'},
  former_modules={
    'paxlite.eval.inference': 'paxlite.generation.inference',
    'paxlite.tools.chat': 'paxlite.generation.commands.chat',
    'paxlite.tools.generate': 'paxlite.generation.commands.generate',
  },
)
