"""Facts about paxlite's experiments, read from files without importing any.

The folder of each family has a listing.json with its experiments, as rows of `paxlite list`, and
the attributes that it declares. That of `experiments/` itself has those of the core and of leaves.
`python -m tests.rules.test_golden --update` writes them, with the digests by which
tests/rules/test_golden.py notices a change of an experiment.
"""

import pathlib
from collections.abc import Iterator

from paxlite.core.json_text import JsonObject, parsed

CORE = 'paxlite.experiments'
NAME = 'listing.json'
_FOLDER = pathlib.Path(__file__).parents[1] / 'experiments'


def experiments() -> list[list[str]]:
  """Returns the rows of all experiments, sorted by their names; see tools.experiments.row."""
  return sorted((row for found in _listings() for row in found['experiments']), key=lambda r: r[1])


def attributes() -> list[dict[str, str]]:
  """Returns the attributes of all experiments of paxlite, each as a table of texts.

  Those of one subject are together: the subjects of the core, in its order, and then others.
  """
  rows = [row for found in _listings() for row in found['attributes']]
  by_name = {row['name']: row for row in reversed(rows)}  # the first that declares one
  subjects = [*dict.fromkeys(row['subject'] for row in rows)]
  return sorted(by_name.values(), key=lambda r: (subjects.index(r['subject']), r['name']))


def folders() -> dict[str, pathlib.Path]:
  """Returns the folders that may have a listing, by their packages: CORE, and the families."""
  below = sorted(path.parent for path in _FOLDER.glob('*/__init__.py'))
  families = {f'{CORE}.{path.name}': path for path in below if path.name != 'parts'}
  return {CORE: _FOLDER} | families


def _listings() -> Iterator[JsonObject]:
  for folder in folders().values():
    if (path := folder / NAME).exists():  # a family of a user in a clone may have none
      yield parsed(path.read_text(encoding='utf-8'))
