"""Options of commands that run the model of a checkpoint."""

from paxlite.cli.parser import Parser, stored

BASE_WEIGHTS = 'folder of LoRA base weights, if moved'


def add_weights(parser: Parser) -> None:
  """Declares what a model needs besides its checkpoint: tokenizer, base weights, dtype."""
  tokenizer = 'file or folder, if not next to the weights'
  parser.option('--tokenizer', tokenizer, stored, default='')
  parser.option('--base_weights', BASE_WEIGHTS, stored, default='')
  parser.option('--dtype', 'of weights (as trained)', choices=('float32', 'bfloat16'))
  parser.attributes()
