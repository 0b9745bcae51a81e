"""The file experiment.json, which says which experiment wrote a run or imported weights."""

import dataclasses
import pathlib
from collections.abc import Mapping

from paxlite.config.former_names import current_values
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import read_object

EXPERIMENT = 'experiment.json'
_PATHS = 'VOCAB_PATH', 'CHECKPOINT_RESTORE_PATH'
_PATH_CHARS = 4096  # The kernel accepts no longer paths.


@dataclasses.dataclass(frozen=True)
class WeightsFacts:
  """What the files beside weights say of the model; all of it is unknown where nothing says it.

  Attributes:
    path: Where the weights are: a CHECKPOINT_RESTORE_PATH.
    experiment: The dotted path of the experiment that wrote them; ''.
    values: The values of its attributes.
    tokenizer: The path of its tokenizer; ''.
    problem: Why some of this is unknown; ''.
  """

  path: str = ''
  experiment: str = ''
  values: Mapping[str, object] = dataclasses.field(default_factory=dict)
  tokenizer: str = ''
  problem: str = ''

  @property
  def positions(self) -> int | None:
    """The number of positions of the model."""
    found = self.values.get('MAX_POSITION_EMBEDDINGS')
    return found if isinstance(found, int) else None


UNKNOWN = WeightsFacts()


def read_experiment(path: pathlib.Path) -> JsonObject:
  """Returns what an experiment.json holds: {'experiment': dotted path, 'values': {…}}.

  Raises:
    UserError: The file is missing or damaged.
  """
  if not path.is_file():
    raise UserError(f'{path} is missing: which model {path.parent} is of is not known')
  found = read_object(path)
  try:
    name, values = str(found['experiment']), dict(found['values'])
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{path} is damaged ({e!r})') from None
  for key in _PATHS:
    value = values.get(key) or ''
    if not isinstance(value, str) or len(value) > _PATH_CHARS or '\0' in value:
      raise UserError(f'{path} is damaged: its {key} is no path')
  return {'experiment': name, 'values': current_values(values, say=False)}
