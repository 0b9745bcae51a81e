"""Names of variables: the `name=` of modules along the path, joined by slashes."""

from collections.abc import Sequence

REPEATED = 'repeat'  # the name under which a repeated stack keeps its parameters [L, …]
REFERENCE = 'reference'  # the name under which the parameters of a frozen reference model are
LORA_VARIABLES = r'.*/lora_[ab]'  # a regular expression that matches the variables of LoRA
DORA_VARIABLES = r'.*/lora_[abm]'  # the same of DoRA, and of both
TOKEN_ROWS = r'(embedding|softmax)/lora_rows'  # the same of LORA_TOKENS
INDEX = 'index'  # in a cache: the number of tokens that each row has
PAGES = 'pages'  # in a cache: the pages of each row, if its rows share them
COUNT = 'count'  # in a cache: how many tokens of each row of a call count
SCALE = '_scale'  # the end of the names of arrays of a cache that scale others
STATE = '_state'  # the end of the names of arrays of a cache that have no slots for tokens
PREDICTIONS = r'predictions_\d+/.*'  # the variables of prediction modules
NOT_PREDICTIONS = r'(?!predictions_\d+/).*'  # all other variables


def path_name(path: Sequence[object]) -> str:
  """A jax key path as 'transformer/x_layers_0/qkv/w'."""
  return '/'.join(str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))) for k in path)
