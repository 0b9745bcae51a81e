"""A recipe: its stages, their inputs, and the conditions at their end.

# my_recipe.py
RECIPE = Recipe([
  Files('data', write_data, {'count': 1000}),
  Stage('pretrain', MyGPT, {'TRAIN_FILES': ['{data}/a.txt']}, holds='held_out: avg_xent <= 5'),
  Stage('sft', MyChats, {'TRAIN_FILES': ['{data}/chats.jsonl']}, starts_from='pretrain'),
])
"""

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean

_NAME = re.compile(r'[a-z][a-z0-9_]*')
_REFERENCE = re.compile(r'(?<!\{)\{(\w+)\}(?!\})')  # Jinja's {{ … }} is none
_HOLDS = re.compile(r'([^:]+): (\w+) (>=|<=|>|<) (\S+)')
_COMPARED = {'>=': operator.ge, '<=': operator.le, '>': operator.gt, '<': operator.lt}


@dataclasses.dataclass(frozen=True)
class Condition:
  """A condition at the end of a stage, as 'sums: exact_match >= 0.2'."""

  evaluation: str  # the evaluation input, or the zero-shot task
  metric: str
  sign: str  # >=, <=, > or <
  bound: float  # the number that it is compared with

  @classmethod
  def parsed(cls, text: str) -> 'Condition':
    """Reads 'EVALUATION: METRIC >= NUMBER'; raises UserError."""
    found = _HOLDS.fullmatch(text)
    try:
      bound = float(found[4] if found else '')
    except ValueError:
      example = "'sums: exact_match >= 0.2'"
      raise UserError(f'holds={text!r} is not written as {example}') from None
    assert found
    return cls(found[1], found[2], found[3], bound)

  def is_met(self, value: float) -> bool:
    return bool(_COMPARED[self.sign](value, self.bound))


@dataclasses.dataclass(frozen=True)
class Files:
  """A stage that makes files, such as a tokenizer or data."""

  name: str  # its name, and that of its folder
  # a function of (folder, **values) that writes files into the folder, which must depend on its
  # arguments alone; or the arguments of a `paxlite` command, such as ['train-tokenizer', 'a.txt',
  # '--vocab_size=500', '--output={tokenizer}/tok.model'] of a stage tokenizer
  makes: Callable[..., object] | Sequence[str]
  # arguments of the function. {NAME} in a text is the folder of an earlier stage
  values: Mapping[str, object] = dataclasses.field(default_factory=dict)
  starts_from: ClassVar[None] = None

  @property
  def command(self) -> list[str]:
    """The arguments of its paxlite command; [] if it has a function."""
    return [] if callable(self.makes) else [*self.makes]

  def changed(self, name: str, text: str) -> 'Files':
    """Returns the stage with another value."""
    if name not in self.values:
      raise UserError(f'{self.name} has no {name}. {_meant(name, self.values)}')
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      value = text
    kind = type(self.values[name])
    if kind is float and type(value) is int:
      value = float(value)
    if type(value) is not kind:
      raise UserError(f'{self.name}.{name}={text} must be of the type {kind.__name__}')
    return dataclasses.replace(self, values={**self.values, name: value})


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage that trains: an ordinary run, in the folder of its name."""

  name: str  # its name, and that of its folder
  experiment: type | str  # the class of an experiment, or its name
  # values of its attributes. {NAME} in a text is the folder of an earlier stage
  values: Mapping[str, object] = dataclasses.field(default_factory=dict)
  # the stage with whose last checkpoint it begins; None: with initial values, or those of its
  # CHECKPOINT_RESTORE_PATH
  starts_from: str | None = None
  # what must hold at its end, as 'sums: exact_match >= 0.2' (see Condition); None: nothing
  holds: str | None = None

  @property
  def class_name(self) -> str:
    """The name of its experiment, as a command line takes it."""
    cls = self.experiment
    return cls if isinstance(cls, str) else f'{cls.__module__}.{cls.__qualname__}'

  @property
  def condition(self) -> Condition | None:
    return None if self.holds is None else Condition.parsed(self.holds)

  @property
  def texts(self) -> dict[str, str]:
    """The values as texts of a command line."""
    return {name: text_of(value) for name, value in self.values.items()}

  def changed(self, name: str, text: str) -> 'Stage':
    """Returns the stage with another value; its name is checked when the experiment is built."""
    if name == 'holds':
      return dataclasses.replace(self, holds=None if text == 'None' else text)
    return dataclasses.replace(self, values={**self.values, name: Stated(text)})


class Stated(str):
  """A value as a command line states it."""


AnyStage = Files | Stage


class Recipe:
  """Stages in their order.

  Raises UserError if a name is not valid or is there twice, or a stage refers to one that does not
  come before it.

  Attributes:
    stages: The stages by their names.
  """

  def __init__(self, stages: Sequence[AnyStage]):
    self.stages: dict[str, AnyStage] = {}
    for stage in stages:
      name = stage.name
      if not _NAME.fullmatch(name):
        raise UserError(f'{name!r} is not a name for a stage: use small letters, digits and _')
      if name in self.stages:
        raise UserError(f'two stages are called {name}: rename one')
      self.stages[name] = stage
      for other in self.needs(name):
        if other not in self.stages or (other == name and not isinstance(stage, Files)):
          meant = did_you_mean(other, self.stages, cutoff=0.6)
          raise UserError(f'stage {name}: no stage {other} comes before it. {meant}'.rstrip())
      if stage.starts_from is not None and isinstance(self.stages[stage.starts_from], Files):
        raise UserError(f'stage {name} starts from {stage.starts_from}, which trains no weights')
      if isinstance(stage, Stage):
        _ = stage.condition
        if stage.starts_from and 'CHECKPOINT_RESTORE_PATH' in stage.values:
          raise UserError(f'stage {name}: starts_from or CHECKPOINT_RESTORE_PATH, not both')
    if not self.stages:
      raise UserError('the recipe has no stages')

  def needs(self, name: str) -> list[str]:
    """Returns the names of the stages whose folders a stage uses, possibly its own."""
    stage = self.stages[name]
    texts = [*_texts(stage.values), *(stage.command if isinstance(stage, Files) else ())]
    found = [*filter(None, [stage.starts_from]), *(x for t in texts for x in _REFERENCE.findall(t))]
    return [*dict.fromkeys(found)]

  def named(self, name: str, flag: str) -> AnyStage:
    """Returns the named stage; raises UserError if it does not exist."""
    if name not in self.stages:
      raise UserError(f'{flag}: no stage {name}. {_meant(name, self.stages)}')
    return self.stages[name]

  def changed(self, settings: Sequence[str]) -> 'Recipe':
    """Returns the recipe with the values of 'STAGE.NAME=VALUE' texts; raises UserError."""
    stages = dict(self.stages)
    for setting in settings:
      key, equals, text = setting.partition('=')
      stage, dot, name = key.partition('.')
      if not (equals and dot and name):
        raise UserError(f'--set {setting} is not written as STAGE.NAME=VALUE')
      self.named(stage, f'--set {setting}')
      stages[stage] = stages[stage].changed(name, text)
    return Recipe([*stages.values()])


def placed(value: Any, folders: Mapping[str, str]) -> Any:
  """Replaces the names of stages in braces by their folders."""
  if isinstance(value, str):
    found = _REFERENCE.sub(lambda m: folders[m[1]], value)
    return Stated(found) if isinstance(value, Stated) else found
  if isinstance(value, list | tuple):
    return [placed(x, folders) for x in value]
  return value


def text_of(value: object) -> str:
  """Returns a value as `paxlite train` reads it from NAME=VALUE."""
  if isinstance(value, Stated) or (isinstance(value, str) and re.fullmatch(r'[\w./+@-]+', value)):
    return str(value)
  return repr(list(value) if isinstance(value, tuple) else value)


def _texts(value: object) -> Iterator[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    yield from _texts([*value.values()])
  elif isinstance(value, list | tuple):
    for x in value:
      yield from _texts(x)


def _meant(name: str, known: Mapping[str, object]) -> str:
  return did_you_mean(name, known, cutoff=0.6) or f'There are: {", ".join(known) or "none"}'
