"""Identifies the data of an input by numbers, which are saved with checkpoints.

The data are the records. Their tokens have a number of their own, because a tokenizer, a chat
template or the day that it sees changes the tokens of the same records.
"""

from collections.abc import Callable, Mapping, Sequence

from paxlite.core.json_text import Json, JsonObject
from paxlite.data.base import Input, RowInput
from paxlite.data.contents import can_compare, combined, differ
from paxlite.data.held_out import RULE
from paxlite.data.mixture import MixtureInput
from paxlite.data.streams import StreamInput


def fingerprint(data: Input) -> int | None:
  """Returns the fingerprint of an input's records; None if it is not known.

  It is the same on every host, and changes when the data changes. It does not depend on the batch
  size, the order or the length of the run. User-defined sources and inputs may have it as the
  attribute `fingerprint`.
  """
  return _of(data, lambda source: getattr(source, 'fingerprint', None))


def tokens_fingerprint(data: Input) -> int | None:
  """Returns the fingerprint of how an input's records are encoded; None if there is none.

  User-defined sources and inputs may have it as the attribute `tokens_fingerprint`.
  """
  return _of(data, lambda source: getattr(source, 'tokens_fingerprint', None))


def identity(data: Input) -> JsonObject:
  """Returns what the metadata of a checkpoint holds to identify the data; {} if it is not known."""
  found = fingerprint(data)
  if found is None:
    return {}
  known: JsonObject = {'fingerprint': found, 'tokens': tokens_fingerprint(data)}
  if any(getattr(part, 'holds_out', False) for part in _parts(data)):
    known['held_out'] = RULE
  left_out = getattr(data, 'left_out', None)
  return known | {'left_out': left_out} if left_out else known


def change(
  now: Mapping[str, Json], before: Mapping[str, Json], encoding: Callable[[], Sequence[str]] = list
) -> str:
  """Describes what changed in the data since a checkpoint; '' for nothing.

  Args:
    now: The identity of the input.
    before: The metadata of the checkpoint.
    encoding: Names what is known to have changed of how records are encoded.
  """
  records, known = now.get('fingerprint'), before.get('fingerprint')
  if records is None or known is None:
    return ''
  if now.get('held_out') and not before.get('held_out'):
    return (
      'an earlier version held out other data, so the run may have trained on part of what is '
      'held out now (EVAL_SOURCES or EVAL_FILES name other data)'
    )
  if differ(records, known):
    return 'its contents have changed since'
  if before['tokens'] != now['tokens']:
    if known_changes := encoding():
      have = 'has' if len(known_changes) == 1 else 'have'
      return f'its records are the same, but {" and ".join(known_changes)} {have} changed since'
    return (
      'its records are the same, but encoded differently: the tokenizer, the chat template, its '
      'date (CHAT_DATE), START_ID, EOS_IDS or TOO_LONG has changed since, or the run is of an '
      "earlier version, which read the tokenizer's files in another way, or let documents begin "
      'with 0'
    )
  if set(before.get('left_out', ())) - set(now.get('left_out', ())):
    return 'LEAVE_OUT no longer names all records that were left out'
  return ''


def changes_of_evaluations(now: Mapping[str, JsonObject], before: Mapping[str, Json]) -> list[str]:
  """Describes, in a line per evaluation input, what changed since a checkpoint.

  Args:
    now: The identities of the inputs by name.
    before: The metadata of the checkpoint; in those of earlier versions, nothing is known but which
      rule chose what is held out.
  """
  of_rule = lambda x: {k: v for k, v in x.items() if k != 'held_out'} if before else {}
  found = []
  for name, known in now.items():
    was = before['evaluated'].get(name, {}) if 'evaluated' in before else of_rule(known)
    if why := change(known, was):
      found.append(
        f"{name} is not the data of the run's evaluations: {why}. Its numbers cannot be compared "
        'with earlier ones: put the data back, or evaluate everything on the same data'
      )
  return found


def is_unknown(now: Mapping[str, Json], before: Mapping[str, Json]) -> bool:
  """Returns whether a checkpoint is of an earlier version, which did not look into such data."""
  records, known = now.get('fingerprint'), before.get('fingerprint')
  return records is not None and known is not None and not can_compare(records, known)


def newly_left_out(now: Mapping[str, Json], before: Mapping[str, Json]) -> int:
  """Returns how many records are left out that were not at a checkpoint; LEAVE_OUT says so."""
  return len(set(now.get('left_out', ())) - set(before.get('left_out', ())))


def _of(data: Input, of: Callable[[object], int | None]) -> int | None:
  if isinstance(data, RowInput):
    return of(data.source)
  if isinstance(data, StreamInput):
    return combined(of(dataset) for dataset in data.source.datasets)
  if isinstance(data, MixtureInput):
    return combined(_of(x, of) for x in data.inputs)
  return of(data)


def _parts(data: Input) -> Sequence[object]:
  """Returns the sources and datasets that an input reads."""
  if isinstance(data, MixtureInput):
    return [part for each in data.inputs for part in _parts(each)]
  if isinstance(data, StreamInput):
    return data.source.datasets
  return [getattr(data, 'source', data)]
