"""The extension for published weights: the commands that read and write them."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str) -> Command:
  return Command(name, purpose, f'paxlite.weights.commands.{name}_weights', 'Models')


_FAMILIES = 'paxlite.weights.commands.families'
EXTENSION = Extension(
  'weights',
  needs=('generation',),
  commands=(
    _command('import', 'read weights of Hugging Face, Meta or Pax'),
    _command('export', 'write weights for Hugging Face or llama.cpp'),
    Command('families', 'the model families that import reads', _FAMILIES, 'Models'),
  ),
  hooks={'names of peft': 'paxlite.weights.adapter_names:named_weights'},
  former_modules={
    f'paxlite.tools.{name}': f'paxlite.weights.commands.{name}'
    for name in ('import_weights', 'export_weights')
  },
)
