"""The options of commands that run the model of a checkpoint."""

from paxlite.cli.parser import Parser, stored

BASE_WEIGHTS = 'folder of the weights that the factors of LoRA belong to, if they were moved'


def add_weights(parser: Parser) -> None:
  """Declares what is read besides a checkpoint to run its model, and how."""
  tokenizer = 'file or folder, if it is not next to the weights'
  parser.option('--tokenizer', tokenizer, stored, default='')
  parser.option('--base_weights', BASE_WEIGHTS, stored, default='')
  parser.option('--dtype', 'of weights (as trained)', choices=('float32', 'bfloat16'))
  parser.attributes()
