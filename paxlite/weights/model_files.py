"""Chooses the files of a Hugging Face folder that hold its weights, as transformers does.

A folder may hold several: a model that was saved again in one file beside the shards of before,
files of another format, an adapter. What is not read is named.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping

from paxlite.core.errors import UserError

log = logging.getLogger('paxlite')

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
ADAPTER = 'adapter_config.json'
_SHARD = re.compile(r'(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors')
# Other weights, and how to read them.
_OTHERS = {
  r'.*\.bin(\.index\.json)?': 'convert its .bin files with transformers',
  r'consolidated\.\d+\.pth': 'its .pth files are read with --from=meta',
  r'.*\.gguf': 'paxlite import FOLDER shows how to convert its .gguf file',
}


def check_no_adapter(where: object, names: Collection[str], base: Callable[[], str]) -> None:
  """Raises UserError if a folder holds an adapter of peft, alone or beside a model.

  Args:
    where: The folder, for the message.
    names: Names of the files in the folder.
    base: Returns the name of the adapter's base model.
  """
  if ADAPTER not in names:
    return
  if 'config.json' in names:
    raise UserError(
      f'{where} holds an adapter ({ADAPTER}) next to a model, and transformers adds it to the '
      "weights: merge it with peft's merge_and_unload, or move it elsewhere"
    )
  raise UserError(
    f'{where} holds a peft adapter without a model: import its base model, {base()}, first, and '
    'then the adapter with --from=peft --base_weights=FOLDER'
  )


def chosen(
  where: object, names: Collection[str], weight_map: Callable[[], Mapping[str, str]]
) -> tuple[list[str], Mapping[str, str]]:
  """Returns the names of the files with the weights, and the index that belongs to them.

  Raises UserError if a file is missing, or it is not clear which files hold the weights.

  Args:
    where: The folder, for messages.
    names: Names of the files in the folder.
    weight_map: Reads the index, which gives the file name of each tensor.
  """
  found = sorted(n for n in names if n.endswith('.safetensors'))
  if SINGLE in names:
    unread = [n for n in found if n != SINGLE] + [INDEX] * (INDEX in names)
    if unread:
      log.warning(
        ('%s: reading %s, as transformers does, and not %s'), where, SINGLE, _list(unread)
      )
    return [SINGLE], {}
  if INDEX in names:
    stated = weight_map()
    wanted = sorted(set(stated.values()))
    missing = [n for n in wanted if n not in names]
    if missing:
      raise UserError(f'{where}/{missing[0]} is missing: {INDEX} names it')
    unread = [n for n in found if n not in wanted]
    if unread:
      log.warning('%s: the files of %s are read, and not %s', where, INDEX, _list(unread))
    return wanted, stated
  if not found:
    hints = (hint for kind, hint in _OTHERS.items() if any(re.fullmatch(kind, n) for n in names))
    hint = next(hints, '')
    raise UserError(f'{where} holds no .safetensors file' + (f': {hint}' if hint else ''))
  if len(found) > 1 or _SHARD.fullmatch(found[0]):
    _check_shards(where, found)
  return found, {}


def _check_shards(where: object, names: list[str]) -> None:
  """Raises UserError unless the files are all shards of one model."""
  matches = [m for name in names if (m := _SHARD.fullmatch(name))]
  kinds = {(m['stem'], m['count']) for m in matches}
  numbers = {int(m['number']) for m in matches}
  if len(matches) < len(names) or len(kinds) > 1:
    raise UserError(
      f'{where} holds {_list(names)}, and neither {SINGLE} nor {INDEX}: remove what does not '
      'belong to the model'
    )
  count = int(matches[0]['count'])
  if len(numbers) < count or len(numbers) < len(names):
    raise UserError(f'{where} holds {len(names)} of {count} files, and no {INDEX}: {_list(names)}')


def _list(names: list[str], shown: int = 4) -> str:
  more = f' and {len(names) - shown} more' if len(names) > shown else ''
  return ', '.join(names[:shown]) + more
