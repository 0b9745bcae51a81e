"""Datasets of the Hub: the files of a split, copied into the shared cache."""

import fnmatch
import functools
import importlib.util
import re
from collections.abc import Sequence

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.data.record_files import OF_RECORDS
from paxlite.files.text_files import kind
from paxlite.hub.listing import README, Listing, listing_of
from paxlite.hub.names import dataset_named

_ABOUT = 'dataset_info.json', 'dataset_infos.json', 'dataset_dict.json', 'state.json'
_SPELLED = {'train': 'train|training', 'validation': 'validation|valid|val|dev', 'test': 'test'}


@functools.cache
def files_of(text: str) -> list[str]:
  """Returns the copies of the files that a text names; [] if it names no dataset of the Hub.

  Raises UserError if there are none, or it is not clear which are meant.
  """
  name = dataset_named(text)
  if name is None:
    return []
  listing = listing_of(name)
  files = _chosen(listing)
  if any(kind(f) == '.parquet' for f in files) and importlib.util.find_spec('pyarrow') is None:
    raise UserError(f'{text} is Parquet, which needs the package pyarrow: {shell.install("hf")}')
  about = [README] * bool(listing.configs and README in listing.sizes)
  folder = listing.download([*about, *files])
  return [str(folder / f) for f in files]


def _chosen(listing: Listing) -> list[str]:
  name, part = listing.name, listing.name.part
  files = [
    f for f in sorted(listing.sizes) if kind(f) in OF_RECORDS and f.split('/')[-1] not in _ABOUT
  ]
  pattern = '.' in part or '*' in part or '/' in part
  if pattern:
    found = _matching(files, [part])
  else:
    found = _stated(listing, files) or _of_split(files, part or 'train')
  if not found:
    some = ', '.join(files[:4]) or 'none of ' + ', '.join(OF_RECORDS)
    what = f'file {part}' if pattern else f'split {part or "train"}'
    raise UserError(f'{name} has no {what}; its files are {some}: name some, as hf:{name}:*.jsonl')
  if len(kinds := sorted({kind(f) for f in found})) > 1:
    raise UserError(
      f'{name} has the records as {" and as ".join(kinds)}: choose one, as hf:{name}:*{kinds[0]}'
    )
  return found


def _stated(listing: Listing, files: Sequence[str]) -> list[str]:
  """Returns the files of the split that the README states; [] if it states none."""
  stated = [c for c in listing.configs if isinstance(c, dict) and c.get('data_files')]
  chosen = [c for c in stated if c.get('config_name') == 'default' or c.get('default')] or stated
  if len(chosen) > 1:
    names = ', '.join(str(c.get('config_name')) for c in chosen)
    raise UserError(
      f'{listing.name} has the configurations {names}: name files, as hf:{listing.name}:FOLDER/*'
    )
  entries = chosen[0]['data_files'] if chosen else []
  split, patterns = listing.name.part or 'train', list[str]()
  for entry in [entries] if isinstance(entries, str | dict) else entries:
    entry = {'split': 'train', 'path': entry} if isinstance(entry, str) else entry
    if entry.get('split', 'train') == split:
      path = entry.get('path') or []
      patterns += [path] if isinstance(path, str) else path
  return _matching(files, patterns)


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
  plain = [pattern.replace('**/', '*').replace('**', '*') for pattern in patterns]
  return [f for f in files if any(fnmatch.fnmatchcase(f, p) for p in plain)]


def _of_split(files: Sequence[str], split: str) -> list[str]:
  """Returns the files whose names have a split; for train, all where no name has any."""
  named = lambda words: [f for f in files if re.search(rf'(^|[/._-])({words})([/._-]|$)', f)]
  found = named(_SPELLED.get(split, re.escape(split)))
  if found or split != 'train' or named('|'.join(_SPELLED.values())):
    return found
  return list(files)
