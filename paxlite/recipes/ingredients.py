"""The ingredients of a stage, and their changes since it ran."""

import json
import os
import pathlib
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import fiddle as fdl

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.checkpointing.checksums import CHECKSUMS, checksum, fingerprint
from paxlite.cli.user_code import is_own
from paxlite.compilation import versions
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.shell import shortened
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.code_changes import changes
from paxlite.experiments.description import configs
from paxlite.experiments.user_sources import recorded, sources
from paxlite.files.json_files import read_object
from paxlite.recipes.experiments import files_of
from paxlite.recipes.recipe import AnyStage, Files, Recipe

_TIMED = 'commit_success.txt'  # has the time of a save
# Values with which the same is trained and evaluated.
_NEUTRAL = {
  'CHECKPOINT_EVERY_N_MINUTES', 'CHECKPOINT_EVERY_N_STEPS', 'CHECKPOINT_MAX_TO_KEEP',
  'ENGINE_CHECK_INTERVAL', 'ENGINE_EXPERTS_TOLERANCE', 'ENGINE_TOLERANCE', 'EPISODE_TIMEOUT',
  'KEPT_EPISODES', 'PHASE_TIMEOUT', 'REWARD_TIMEOUT', 'STACK_TRACE_INTERVAL', 'STEP_TIMEOUT',
  'STOP_ON_FAILED_SAVE', 'SUMMARY_INTERVAL_STEPS', 'TRACKERS',
}  # fmt: skip


def ingredients(
  recipe: Recipe, name: str, e: Experiment | None, folder: pathlib.Path, before: JsonObject
) -> JsonObject:
  """Returns the inputs that determine a stage's result, without the stages that it needs.

  Args:
    name: The stage.
    e: Its experiment; None: it makes files.
    folder: The folder of the recipe.
    before: What was returned before it ran, or {}; files with the sizes and times there are not
      read again.

  Returns:
    'values', 'code' (fingerprints by names) and 'files' (size, time and CRC-32 by paths).
  """
  stage = recipe.stages[name]
  if e is None:
    assert isinstance(stage, Files)
    values: dict[str, Any] = {'makes': _named(stage), **stage.values}
    code = _code_of(stage)
    found = [x for x in _texts(stage.values) if '{' not in x and os.path.exists(x)]
  else:
    values = {'experiment': full_name(type(e)), **e.values()}
    values = {k: x for k, x in values.items() if k not in _NEUTRAL}
    code = recorded(configs(e))['user']
    found = files_of(e, folder)
  known = before.get('files', {})
  made = {
    'values': values, 'code': code, 'files': {path: _stamp(path, known.get(path)) for path in found}
  }  # fmt: skip
  text = json.dumps(made, default=repr).replace(f'{folder}{os.sep}', '{folder}/')
  return dict(parsed(text))


def differences(now: JsonObject, before: JsonObject) -> list[str]:
  """Returns descriptions of the differences between two sets of a stage's inputs."""
  one, two = now['values'], before['values']
  found = [f'{k} {_short(two.get(k))} → {_short(one.get(k))}' for k in _differing(one, two)]
  found += [f'the code of {name}' for name in _differing(now['code'], before['code'])]
  sums = ({path: stamp[::2] for path, stamp in x['files'].items()} for x in (now, before))
  return found + [f'the file {path}' for path in _differing(*sums)]


def code_of_run(e: Experiment, folder: pathlib.Path) -> list[str]:
  """Returns descriptions of code changes since the run in a folder began."""
  try:
    return changes(e, folder)
  except UserError as error:
    return [str(error)]


def outcome(stage: AnyStage, folder: pathlib.Path) -> str | None:
  """Returns a fingerprint of a stage's output folder; None if it is empty.

  It is the last step and a checksum of the arrays of its checkpoint, or a checksum of all files.
  """
  if isinstance(stage, Files):
    if not folder.is_dir():
      return None
    paths = sorted(p for p in folder.rglob('*') if p.is_file())
    return versions.checksum(paths) + f' of {len(paths)}'
  checkpoints = Checkpoints(folder / 'checkpoints', read_only=True)
  steps = checkpoints.steps()
  if not steps or not (path := checkpoints.folder(steps[-1]) / CHECKSUMS).is_file():
    return None
  sums = {name: x for name, x in read_object(path).items() if not name.endswith(_TIMED)}
  return f'{steps[-1]}:{zlib.crc32(json.dumps(sums, sort_keys=True).encode()):08x}'


def _named(stage: Files) -> object:
  made: Any = stage.makes
  return f'{made.__module__}.{made.__qualname__}' if callable(made) else stage.command


def _code_of(stage: Files) -> dict[str, str]:
  """Returns fingerprints of a function and its dependencies; for paxlite's code, of the module."""
  if not callable(stage.makes):
    return {}
  file = getattr(sys.modules.get(stage.makes.__module__), '__file__', None) or '<'
  if not is_own(file):
    return {file: versions.checksum([pathlib.Path(file)])} if os.path.isfile(file) else {}
  return {name: x for name, (x, _) in sources([fdl.Partial(stage.makes)]).items()}


def _stamp(path: str, known: list[int] | None) -> list[int]:
  """Returns the size, the time and the CRC-32 of a file, or of a folder as a whole."""
  place = pathlib.Path(path)
  if place.is_dir():
    for at in (place / 'checkpoints', place):
      stored = Checkpoints(at, read_only=True)
      if steps := stored.steps():
        return [0, 0, fingerprint(stored.folder(steps[-1])) or 0]
    if (crc := fingerprint(place)) is not None:  # imported weights
      return [0, 0, crc]
    paths = sorted(p for p in place.rglob('*') if p.is_file())
    return [len(paths), 0, int(versions.checksum(paths), 16)]
  about = place.stat()
  if known is not None and known[:2] == [about.st_size, about.st_mtime_ns]:
    return known
  size, crc = checksum(place)
  return [size, about.st_mtime_ns, crc]


def _differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
  return sorted(k for k in one.keys() | two.keys() if one.get(k) != two.get(k))


def _short(value: object) -> str:
  return shortened('unset' if value is None else str(value), 60)


def _texts(values: Mapping[str, object]) -> Iterable[str]:
  for value in values.values():
    items = value if isinstance(value, list | tuple) else [value]
    yield from (x for x in items if isinstance(x, str))
