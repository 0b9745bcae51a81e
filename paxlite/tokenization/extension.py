"""The extension for tokenization: commands that write token datasets and tokenizers."""

from paxlite.core.extension import Command, Extension

_HERE = 'paxlite.tokenization'


def _command(name: str, purpose: str) -> Command:
  return Command(name, purpose, f'{_HERE}.commands.{name.replace("-", "_")}', 'Data')


EXTENSION = Extension(
  'tokenization',
  commands=(
    _command('tokenize', 'turn text into a dataset of tokens'),
    _command('train-tokenizer', 'train a tokenizer on your text'),
  ),
  former_modules={
    'paxlite.tools.tokenize': f'{_HERE}.commands.tokenize',
    'paxlite.tools.train_tokenizer': f'{_HERE}.commands.train_tokenizer',
    'paxlite.data.flat_tokens_writer': f'{_HERE}.flat_tokens_writer',
    'paxlite.data.packaged.build': f'{_HERE}.packaged',
    'paxlite.data.tokenizer_training': f'{_HERE}.training',
  },
)
