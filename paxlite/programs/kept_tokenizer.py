"""The copy of its tokenizer that a run keeps, so that it needs no other folder when it is read."""

import logging
import pathlib

import jax

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data import tokenizer_copies
from paxlite.experiments.base import Experiment
from paxlite.experiments.identity import run_values

log = logging.getLogger('paxlite')

NAME = 'VOCAB_PATH'
# of the attributes that encode examples, those that may change without --accept_changes
_ENCODE = 'CHAT_TEMPLATE', 'CHAT_DATE', 'CHAT_THINKING', 'EOS_IDS'


def path_of(e: Experiment) -> str:
  """Returns the tokenizer of the data of an experiment; ''."""
  return e.tokenizer_path or (e.weights.tokenizer if NAME in e.values() else '')


def keep(e: Experiment, folder: pathlib.Path) -> None:
  """Copies the tokenizer of an experiment into the folder of its run, in process 0."""
  path = path_of(e)
  if jax.process_index() != 0 or not path:
    return
  try:
    tokenizer_copies.keep(path, folder)
  except (UserError, OSError) as error:  # the run itself needs no copy
    log.warning('%s keeps no copy of its tokenizer: %s', folder, error)


def changes(e: Experiment, folder: pathlib.Path) -> list[str]:
  """Names what encodes examples in another way than at the run's last start, as far as known."""
  before, path = run_values(folder), path_of(e)
  own = tokenizer_copies.kept(folder)
  found = tokenizer_copies.differences(path, str(own)) if own and path else []
  was, now = before['values'] if before else {}, e.values()
  return found + [k for k in _ENCODE if k in was and k in now and was[k] != now[k]]


def to_read(found: JsonObject, folder: pathlib.Path) -> JsonObject:
  """Returns run_values of a run that is read, with its own copy as VOCAB_PATH."""
  own = tokenizer_copies.kept(folder) if NAME in found['values'] else None
  return {**found, 'values': {**found['values'], NAME: str(own)}} if own else found
