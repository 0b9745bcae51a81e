"""Compares what all processes of a run must have in common, before it can do harm.

A statement says it as text by name: the values of the experiment, versions, fingerprints. Processes
with unlike values would train on without an error, wait for each other for ever, or abort.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed

Statement = Mapping[str, str]

_SHOWN = 5  # differences that a message names
_LONGEST = 80  # characters of a value in a message


def difference(statements: Sequence[Statement]) -> str:
  """Returns a sentence on how the statements of processes 0, 1, … differ; '' if they do not.

  It is about the first process whose statement differs from that of process 0.
  """
  first = statements[0]
  for process, other in enumerate(statements):
    changed = [
      f'process {process} has {_stated(name, other)}, process 0 has {_shown(name, first)}'
      for name in dict.fromkeys([*first, *other])
      if first.get(name) != other.get(name)
    ]
    if changed:
      more = f'; and {len(changed) - _SHOWN} more' if len(changed) > _SHOWN else ''
      return (
        f'the processes of this run differ: {"; ".join(changed[:_SHOWN])}{more}. Start all of them '
        'with the same command, environment, packages and files'
      )
  return ''


def compare(statement: Statement) -> None:
  """Compares statements through collectives; every process must call this.

  Raises:
    UserError: The statements differ. All processes raise it.
  """
  import jax

  from paxlite.processes.process_messages import broadcast, gathered

  if jax.process_count() == 1:
    return
  text = json.dumps(dict(statement)).encode()
  digests = gathered(np.frombuffer(hashlib.sha256(text).digest(), np.int32))()
  others = [p for p, digest in enumerate(digests) if (digest != digests[0]).any()]
  if others:
    found = {p: parsed(broadcast(text, source=p)) for p in (0, others[0])}
    raise UserError(difference([found[0]] * others[0] + [found[others[0]]]))


def _stated(name: str, statement: Statement) -> str:
  return f'{name}{" " if " " in name else "="}{_shown(name, statement)}'


def _shown(name: str, statement: Statement) -> str:
  text = statement.get(name, 'nothing')
  return text if len(text) <= _LONGEST else f'{text[:_LONGEST]}…'
