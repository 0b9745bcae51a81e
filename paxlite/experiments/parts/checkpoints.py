"""When a run saves checkpoints, and which weights or run a new run starts from."""

import copy
from collections.abc import Collection, Mapping
from typing import Annotated, Self

from paxlite.config.attribute_kinds import Count, OffAtZero, Run, Training, at_most
from paxlite.config.attributes import StoredPath
from paxlite.config.experiment_file import UNKNOWN, WeightsFacts
from paxlite.core.errors import UserError
from paxlite.experiments.parts.part import Part

_HOW = 'IGNORE_RULES', 'RENAME_RULES', 'RESTORE_STATE', 'RESTORE_CHANGES'
_BESIDE = {'CHECKPOINT_RESTORE_PATH': ' '.join(f'CHECKPOINT_{how}' for how in _HOW)}


class Checkpointing(Part, subject='Checkpoints', beside=_BESIDE):
  """Checkpoints in the run's folder, and what a new run starts from.

  That is imported weights, or a job_log_dir or a checkpoint of a run.
  """

  CHECKPOINT_EVERY_N_STEPS: Run[Count] = 5000  # steps between checkpoints
  CHECKPOINT_EVERY_N_MINUTES: Run[Annotated[OffAtZero, at_most(1e6)]] = (
    10.0  # minutes until a checkpoint if steps take longer; 0: only by steps
  )
  CHECKPOINT_MAX_TO_KEEP: Run[Count] = 10  # newest checkpoints to keep
  STOP_ON_FAILED_SAVE: Run[bool] = False  # ends a run at the first save after a failed one
  CHECKPOINT_RESTORE_PATH: Run[StoredPath] = ''  # weights or run that a new run starts from
  CHECKPOINT_IGNORE_RULES: Training[
    list[str]
  ] = []  # regular expressions of variables that keep initial values
  CHECKPOINT_RENAME_RULES: Training[
    list[str]
  ] = []  # regular expressions of variables, 'name here=>name there'
  CHECKPOINT_RESTORE_STATE: Training[bool] = False  # restores optimizer state and step too
  CHECKPOINT_RESTORE_CHANGES: Training[
    list[str]
  ] = []  # model attributes that may differ from the restored checkpoint

  @property
  def ignored_variables(self) -> list[str]:
    """Regular expressions of variables that weights leave at their initial values."""
    return list(self.CHECKPOINT_IGNORE_RULES)

  _facts: Mapping[str, WeightsFacts] = {}

  @property
  def weights(self) -> WeightsFacts:
    """The known facts about CHECKPOINT_RESTORE_PATH; no experiment reads a file for them.

    Programs read it once, when they are built: see programs.weights_model.
    """
    return self.facts_of(self.CHECKPOINT_RESTORE_PATH)

  @property
  def paths_of_weights(self) -> list[str]:
    """The paths of weights of which the experiment must know something."""
    return [self.CHECKPOINT_RESTORE_PATH]

  def facts_of(self, path: str) -> WeightsFacts:
    """Returns what is known of the weights at a path."""
    return self._facts.get(path, UNKNOWN)

  @property
  def known_weights(self) -> Collection[WeightsFacts]:
    """All that is known of weights."""
    return self._facts.values()

  def knowing(self, *weights: WeightsFacts) -> Self:
    """Returns a copy that knows this of weights."""
    known = copy.copy(self)
    known._facts = {**self._facts, **{facts.path: facts for facts in weights}}
    return known

  def replaced(self, **changes: object) -> Self:
    return super().replaced(**changes).knowing(*self.known_weights)

  def validate(self) -> None:
    super().validate()
    for name in (f'CHECKPOINT_{how}' for how in _HOW):
      if getattr(self, name) and not self.CHECKPOINT_RESTORE_PATH:
        raise UserError(f'{name} needs CHECKPOINT_RESTORE_PATH=FOLDER')
