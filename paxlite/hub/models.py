"""Models of the Hub: the files that paxlite reads, and their weights, imported into a cache."""

import contextlib
import functools
import pathlib
from collections.abc import Callable

from paxlite.cli.terminal import warn
from paxlite.core.errors import UserError, located
from paxlite.data import tokenizer_files
from paxlite.files import schemes
from paxlite.files.json_files import read_object
from paxlite.hub.listing import Listing, listing_of
from paxlite.hub.names import COMMIT, model_named

_SMALL = 'config.json', 'generation_config.json', *tokenizer_files.FILES


def download_of(text: str) -> Callable[[str], str] | None:
  """Returns what downloads the model that a text names; None if it is a path.

  It gets the folder into which the weights are to be imported, and returns the folder of its files.
  """
  name = model_named(text)
  return None if name is None else lambda to: str(_downloaded(listing_of(name), pathlib.Path(to)))


@functools.cache
def imported(text: str) -> list[str]:
  """Returns the folder of the imported weights of a model of the Hub; [] if `text` is a path.

  They are imported into paxlite/hub of the user's cache, one folder for each commit. Those of other
  commits follow: a run may have begun with one of them. Raises UserError if the model cannot be
  had, or is of no family that paxlite knows.
  """
  name = model_named(text)
  if name is None:
    return []
  place = lambda commit: schemes.cache().with_name('hub') / name.repo / commit
  if COMMIT.fullmatch(name.revision) and place(name.revision).is_dir():
    return [str(place(name.revision))]
  listing = listing_of(name)
  to = place(listing.commit)
  if not to.is_dir():
    _import(listing, to)
  others = [p for p in to.parent.iterdir() if COMMIT.fullmatch(p.name) and p != to]
  return [*map(str, (to, *others))]


def _import(listing: Listing, to: pathlib.Path) -> None:
  from huggingface_hub.utils import WeakFileLock

  from paxlite.weights.commands.import_weights import import_published

  to.parent.mkdir(parents=True, exist_ok=True)
  with WeakFileLock(to.with_name(f'.{to.name}.import')):  # other processes wait for this one
    if not to.is_dir():
      folder, named = _downloaded(listing, to), str(listing.name)
      line, *_ = import_published('hf', folder, to, None, None, named=named)
      warn(f'{listing.name} is imported: {line}')


def _downloaded(listing: Listing, to: pathlib.Path) -> pathlib.Path:
  """Downloads what describes a model, and then the weights if paxlite can read them."""
  from paxlite.weights import model_files
  from paxlite.weights.families import experiment_of
  from paxlite.weights.huggingface import weight_map

  name, there = listing.name, listing.sizes
  if 'config.json' not in there:
    raise UserError(f'{name} has no config.json, so it is not a transformers model: {name.page}')
  index = [model_files.INDEX] * (model_files.SINGLE not in there)
  # those of processors go back with a model that is exported whole
  described = [n for n in there if '/' not in n and n.endswith(('_config.json', '_map.json'))]
  named = (*_SMALL, model_files.ADAPTER, *index)
  small = [*dict.fromkeys(n for n in (*named, *described) if n in there)]
  folder = listing.download(small)
  top = [n for n in there if '/' not in n]
  base = lambda: str(read_object(folder / model_files.ADAPTER).get('base_model_name_or_path'))
  model_files.check_no_adapter(name, top, base)
  why = located(f'{listing.problem}. Of its copy') if listing.problem else contextlib.nullcontext()
  with why:
    files, _ = model_files.chosen(name, top, lambda: weight_map(folder / model_files.INDEX))
  with located(str(name)):
    experiment_of(read_object(folder / 'config.json'), folder / 'config.json')
  return listing.download([*small, *files], beside=to)
