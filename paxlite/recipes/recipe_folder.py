"""The progress of a recipe: recipe.json in its folder, and the stages still to run."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Literal

from paxlite.core.errors import UserError, listed
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import write_file
from paxlite.experiments.base import Experiment
from paxlite.files.json_files import read_object
from paxlite.files.set_aside import move_aside
from paxlite.recipes.ingredients import code_of_run, differences, ingredients, outcome
from paxlite.recipes.recipe import Recipe, Stage

_FILE = 'recipe.json'
_UNFINISHED = '.unfinished'
_OTHER = 'choose another --folder'
_KEYS = {'values', 'code', 'files', 'needed', 'outcome'}  # of a stage


@dataclasses.dataclass(frozen=True)
class Status:
  """The state of a stage."""

  state: Literal['done', 'continues', 'runs', 'runs again']
  reasons: tuple[str, ...]  # why it runs again
  made_of: JsonObject  # what it is made of now; see ingredients

  def __str__(self) -> str:
    return f'{self.state}: {listed(self.reasons)}' if self.reasons else self.state


class RecipeFolder:
  """The folder of a recipe, with the records of its stages.

  Raises UserError if the folder is that of another recipe, or of something else.

  Args:
    name: The dotted name of its module.
    folder: Its folder; it may not exist.
  """

  def __init__(self, recipe: Recipe, name: str, folder: pathlib.Path):
    self._recipe, self._name, self.folder = recipe, name, folder
    self._path = folder / _FILE
    self._entries = self._read()

  def _read(self) -> dict[str, JsonObject]:
    if self._path.is_file():
      found = read_object(self._path)
      of = found.get('recipe')
      if of != self._name:
        raise UserError(f'{self.folder} belongs to the recipe {of}, not {self._name}: {_OTHER}')
      stages = found.get('stages')
      if not (isinstance(stages, dict) and all(entry.keys() >= _KEYS for entry in stages.values())):
        raise UserError(f'{self._path} is damaged: {_OTHER}')
      return stages
    is_new = not self.folder.exists()
    if is_new or (self.folder.is_dir() and {p.name for p in self.folder.iterdir()} <= {'.lock'}):
      return {}
    raise UserError(f'{self.folder} holds something other than a recipe: {_OTHER}')

  def statuses(
    self, names: Collection[str], experiments: Mapping[str, Experiment]
  ) -> dict[str, Status]:
    """Returns the states of these stages, in the order of the recipe.

    A stage whose values, code or data have changed runs again, and so does each one that needs it.
    """
    found: dict[str, Status] = {}
    self._entries = self._read()  # another process may have had the folder until now
    for name in names:
      entry = self._entries.get(name)
      e = experiments.get(name)
      made = ingredients(self._recipe, name, e, self.folder, entry or {})
      needed = self._needed(name)
      redone = [n for n in needed if found[n].state != 'done']
      if entry is None:
        if (self.folder / name).exists():
          raise UserError(f'{self.folder / name} is not of this recipe: move it elsewhere')
        found[name] = Status('runs', (), made)
        continue
      reasons = differences(made, entry)
      if e is not None and not reasons and (self.folder / name).is_dir():
        reasons = code_of_run(e, self.folder / name)
      reasons += [f'it needs {n}' for n in redone] or self._replaced(entry, needed)
      is_done = entry['outcome'] is not None
      if is_done and not reasons:
        left = outcome(self._recipe.stages[name], self.folder / name)
        if left != entry['outcome']:
          reasons = ['what it had made is gone' if left is None else 'what it had made has changed']
      state: Literal['done', 'continues'] = 'done' if is_done else 'continues'
      found[name] = Status('runs again' if reasons else state, tuple(reasons), made)
    return found

  def begin(self, statuses: Mapping[str, Status]) -> list[str]:
    """Moves the old folders of stages that run again aside; returns sentences about this."""
    said = []
    for name, status in statuses.items():
      if status.state != 'runs again':
        continue
      if os.path.lexists(self.folder / name):
        aside = move_aside(self.folder / name, 'before')
        said.append(f'{self.folder / name} was moved to {aside.name}')
      self._entries.pop(name, None)
    self._write()
    return said

  def starts(self, name: str, made_of: JsonObject) -> None:
    """Records that a stage starts or continues."""
    needed = {n: self._entries[n]['outcome'] for n in self._needed(name)}
    self._entries[name] = {**made_of, 'needed': needed, 'outcome': None}
    self._write()

  def ends(self, name: str) -> None:
    """Records that a stage is done; raises UserError if its folder is empty."""
    stage = self._recipe.stages[name]
    left = outcome(stage, self.folder / name)
    if left is None:
      what = 'checkpoint' if isinstance(stage, Stage) else 'file'
      raise UserError(f'stage {name} has ended without a {what}')
    self._entries[name]['outcome'] = left
    self._write()

  def unfinished(self, name: str) -> pathlib.Path:
    """The folder of a stage that makes files, before it is complete."""
    return self.folder / f'{name}{_UNFINISHED}'

  def _needed(self, name: str) -> list[str]:
    return [n for n in self._recipe.needs(name) if n != name]

  def _replaced(self, entry: JsonObject, needed: Collection[str]) -> list[str]:
    now = {n: self._entries[n]['outcome'] for n in needed}
    return [f'{n} was made again' for n in needed if entry['needed'].get(n) != now[n]]

  def _write(self) -> None:
    text = json.dumps({'recipe': self._name, 'stages': self._entries}, indent=1)
    write_file(self._path, text.encode() + b'\n')
