"""Attributes that were renamed. Their former names are understood, and a warning says the new one.

They are understood on the command line, in classes, in calls, and in the files of older runs.
"""

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import TypeVar

from paxlite.core.errors import UserError

T = TypeVar('T')

FORMER = {
  'DROPLESS_ROOM': 'DROPLESS_BUFFER_FACTOR', 'LAYER_INPUT_DIMS': 'PER_LAYER_EMBEDDING_DIMS',
  'LAYER_INPUT_VOCAB_SIZE': 'PER_LAYER_EMBEDDING_VOCAB_SIZE', 'MAMBA_LEAST_STEP': 'MAMBA_DT_MIN',
  'MAMBA_MOST_STEP': 'MAMBA_DT_MAX', 'MAX_TEXTS_PER_ROW': 'MAX_SEGMENTS_PER_SEQ',
  'NUM_KEY_READERS': 'NUM_KV_SHARED_LAYERS', 'NUM_STREAMS': 'HYPER_CONNECTION_STREAMS',
  'QUERY_GROWTH': 'ATTENTION_TEMPERATURE_SCALE',
  'QUERY_GROWTH_LENGTH': 'ATTENTION_TEMPERATURE_FLOOR',
  'READER_HIDDEN_DIMS': 'KV_SHARED_HIDDEN_DIMS', 'REFERENCE_ONCE': 'PRECOMPUTE_REFERENCE',
  'ROPE_FAST_TURNS': 'ROPE_BETA_FAST', 'ROPE_SLOW_TURNS': 'ROPE_BETA_SLOW',
  'SPARSE_WINDOW_RATE': 'SPARSE_KV_COMPRESSION_RATIO', 'STREAM_FLOOR': 'HYPER_CONNECTION_EPSILON',
  'STREAM_ITERATIONS': 'HYPER_CONNECTION_SINKHORN_ITERATIONS',
  'WINDOW_RATE': 'KV_COMPRESSION_RATIO',
}  # fmt: skip

# By these names the checksum of an experiment, which local states hold, has attributes.
FINGERPRINTED = {
  now: former
  for former, now in FORMER.items()
  if former not in ('DROPLESS_ROOM', 'MAX_TEXTS_PER_ROW')
}

# Attributes that are gone. Files of older runs may have them.
GONE = frozenset({'EVAL_RUN_CODE'})

log = logging.getLogger('paxlite')


def current(name: str) -> str:
  """Returns the name that an attribute has now, and says once if it is another one."""
  if name in FORMER:
    _say(name)
  return FORMER.get(name, name)


def refuse_both(names: Iterable[str]) -> None:
  """Raises UserError if an attribute is among names twice, by its former and its present one."""
  given = set(names)
  for name in sorted(FORMER.keys() & given):
    if FORMER[name] in given:
      raise UserError(f'{name} and {FORMER[name]} are one attribute: leave {name} out')


def current_values(values: Mapping[str, T], say: bool = True) -> dict[str, T]:
  """Returns values by the names that their attributes have now.

  Args:
    values: Values by current and former names.
    say: Whether a user has written the names, and should know the new ones; otherwise they are
      those of an older run, and what is gone is left out.
  """
  if say:
    return {current(name): value for name, value in values.items()}
  return {FORMER.get(name, name): value for name, value in values.items() if name not in GONE}


@functools.cache
def _say(name: str) -> None:
  log.warning('the attribute %s is now called %s', name, FORMER[name])
