"""Finds changes in an experiment's code since a run started.

Attributes are compared in identity.py. Here are the built config, which the methods of a user's
experiment make, and the source of the user's functions and classes in it.
"""

import pathlib
import re
from collections.abc import Mapping

from paxlite.compilation.versions import code_of_paxlite
from paxlite.config.templates import config_text
from paxlite.core.errors import UserError, listed
from paxlite.experiments.base import Experiment
from paxlite.experiments.description import configs
from paxlite.experiments.identity import identity_of, run_values
from paxlite.experiments.user_sources import COMPARED, SOURCES, sources
from paxlite.files.json_files import read_object

_CONFIG = 'config.txt'
_ADDRESS = re.compile(' at 0x[0-9a-f]+')  # of functions that a method makes anew
_LEFT_OUT = '.left_out.without'  # the function that LEAVE_OUT puts around an input


def changes(e: Experiment, folder: pathlib.Path) -> list[str]:
  """Returns texts on the code that differs from that of a run's last start.

  A field of the built config has its path, the value before and the value now. A function or class
  has its name and place. The experiment is built with the values of attributes that the run has, so
  that no attribute makes a difference. Configs are compared only where the code of paxlite is the
  same. A run without sources.json has nothing to compare. Raises UserError if a file of the folder
  is damaged.

  Args:
    e: The experiment as it is now.
    folder: The folder of the run.
  """
  path, before = folder / SOURCES, run_values(folder)
  if before is None or not path.is_file():
    return []
  stored = read_object(path)
  theirs = stored.get('user')
  if not isinstance(theirs, Mapping):
    raise UserError(f'{path} is damaged: remove it')
  is_comparable = stored.get('paxlite') == code_of_paxlite() and (folder / _CONFIG).is_file()
  built = configs(_with_values(e, before['values']) if is_comparable else e)
  built = {name: cfg for name, cfg in built.items() if name in COMPARED}
  fields = []
  if is_comparable:
    now = '\n'.join(config_text(cfg, name) for name, cfg in built.items())
    fields = differing((folder / _CONFIG).read_text(errors='replace'), now, tuple(built))
  code = sources(built.values())
  # what is left out is a file's contents, of which checks of its own say more
  fields = [f for f in fields if not any(value.endswith(_LEFT_OUT) for value in f[1:])]
  return [f'{path} {x} → {y}' for path, x, y in fields] + [
    f'{name} ({place})' for name, (x, place) in sorted(code.items()) if theirs.get(name, x) != x
  ]


def _with_values(e: Experiment, values: Mapping[str, object]) -> Experiment:
  """Returns an experiment with the values of a run, but for the places of its weights."""
  ours = identity_of(e)['values']
  other = {
    name: value
    for name, value in values.items()
    if name in ours and ours[name] != value and ours[name] not in e.paths_of_weights
  }
  return e.replaced(**other) if other else e


def refuse_other_code(e: Experiment, folder: pathlib.Path) -> None:
  """Raises UserError if the code of a run has changed since its last start."""
  if found := changes(e, folder):
    raise UserError(
      f'the code has changed since the last start of {folder}: {listed(found)}. Undo the change, '
      'choose another folder, or continue with the change: --accept_changes'
    )


def other_code(one: pathlib.Path, two: pathlib.Path) -> list[str]:
  """Returns texts on the built configs and the user's code of two runs, A and B, that differ."""
  texts, sources_of = ([folder / name for folder in (one, two)] for name in (_CONFIG, SOURCES))
  if not all(path.is_file() for path in texts + sources_of):
    return []
  before, now = (path.read_text(errors='replace') for path in texts)
  fields = differing(before, now)
  a, b = (read_object(path)['user'] for path in sources_of)
  names = sorted(name for name in a.keys() & b.keys() if a[name] != b[name])
  return [f'the code of {name}' for name in names] + [
    f'{path}: {x} in A, {y} in B' for path, x, y in fields
  ]


def differing(
  before: str, now: str, roots: tuple[str, ...] = COMPARED
) -> list[tuple[str, str, str]]:
  """Returns (path, before, now) of each field in which two texts of configs differ.

  Of a part with another class, the class alone is named. Files are left out, because data are
  compared by their contents.

  Args:
    before: The text of configs, as config.txt has it.
    now: Another.
    roots: The names of the configs to compare.
  """
  one, two = _fields(before, roots), _fields(now, roots)
  other = [path for path in {**one, **two} if one.get(path) != two.get(path)]
  is_below = lambda path: any(path.startswith((f'{p}.', f'{p}[')) for p in other)
  return [(p, one.get(p, 'unset'), two.get(p, 'unset')) for p in other if not is_below(p)]


def _fields(text: str, roots: tuple[str, ...]) -> dict[str, str]:
  matches = re.finditer(r'^([^:=\n]*)(?: = |: )(.*)$', _ADDRESS.sub('', text), re.MULTILINE)
  is_of = lambda path: re.split(r'[.\[]', path)[0] in roots
  is_file = lambda path, value: path.startswith('train_input') and re.search('[\'"].*/', value)
  return {
    path: x for path, x in (m.groups() for m in matches) if is_of(path) and not is_file(path, x)
  }
