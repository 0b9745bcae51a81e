"""What generation_config.json of a Hugging Face folder says of how text is generated."""

import logging
import math
import pathlib

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel

log = logging.getLogger('paxlite')

_PENALTY = 'repetition_penalty'
# Keys that change the likeliest text, which paxlite does not read, with the values that do not.
_UNREAD = {
  'bad_words_ids': (None, []),
  'begin_suppress_tokens': (None, []),
  'encoder_repetition_penalty': (None, 1.0),
  'exponential_decay_length_penalty': (None,),
  'forced_bos_token_id': (None,),
  'forced_eos_token_id': (None,),
  'guidance_scale': (None, 1.0),
  'min_length': (None, 0),
  'min_new_tokens': (None, 0),
  'no_repeat_ngram_size': (None, 0),
  'num_beams': (None, 1),
  'penalty_alpha': (None, 0),
  'sequence_bias': (None, {}),
  'suppress_tokens': (None, []),
}


def read_generation(
  config: JsonObject, experiment: LanguageModel, where: pathlib.Path
) -> LanguageModel:
  """Returns the experiment with the repetition penalty of generation_config.json.

  Further keys that change the likeliest text are named in a warning. Those of sampling are not
  read, because the likeliest token is taken unless TEMPERATURE says otherwise.

  Args:
    config: The contents of the file.
    experiment: The experiment of the model.
    where: The path of the file, for messages.

  Raises:
    UserError: The penalty is not a number above 0.
  """
  if unread := [k for k, neutral in _UNREAD.items() if k in config and config[k] not in neutral]:
    log.warning(
      '%s: %s changes what transformers writes, and is not read', where, ', '.join(unread)
    )
  penalty = config.get(_PENALTY)
  if penalty is None:
    return experiment
  if (
    isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < math.inf
  ):
    raise UserError(f'{where}: {_PENALTY}={penalty!r} must be a number above 0')
  return experiment.replaced(REPETITION_PENALTY=float(penalty))


def written_generation(experiment: LanguageModel) -> JsonObject:
  """Returns what an experiment says of generation, as keys of generation_config.json."""
  penalty = experiment.REPETITION_PENALTY
  return {} if penalty == 1 else {_PENALTY: penalty}
