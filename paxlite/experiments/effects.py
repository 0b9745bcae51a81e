"""Finds values that a user has set and that change nothing, because other values leave them out."""

import contextlib
import functools
from collections.abc import Collection

from paxlite.core.attribute_kinds import Kind
from paxlite.core.attributes import derived
from paxlite.core.errors import UserError
from paxlite.core.templates import config_text
from paxlite.experiments.base import Experiment
from paxlite.experiments.description import configs_text

# A permission, and what matters to data, to prompts and to initial values, which no config of the
# model holds.
_NOT_OF_CONFIGS = {'HEADS_SPAN_MODEL', 'START_ID', 'SEED', 'MAX_SEQ_LEN', 'PACKED_INPUT'}


def without_effect(experiment: Experiment, known: Collection[str]) -> list[str]:
  """Returns the attributes of model and training that a user has set, and that change nothing.

  They are set on this object, or in a class outside of paxlite. An attribute changes nothing if the
  configs that the experiment makes are the same with the value that it would have otherwise, and
  `validate` accepts that value.

  Args:
    experiment: The experiment.
    known: Attributes of which it is known already that they have no effect; they are left out.
  """
  cls, found = type(experiment), []
  of_task = functools.cache(lambda: config_text(experiment.task(), 'task'))
  text = functools.cache(lambda: configs_text(experiment))
  values = {name: value for name, value in vars(experiment).items() if name.isupper()}
  for name in experiment.values_of(Kind.SHAPE, Kind.FUNCTION, Kind.TRAINING):
    if name in known or name in _NOT_OF_CONFIGS or name.startswith('CHECKPOINT_'):
      continue
    others = {other: value for other, value in values.items() if other != name}
    if name not in values:
      published = _published(cls, name)
      if isinstance(published, derived):
        continue
      others[name] = published
    with contextlib.suppress(UserError):
      without = cls(**others)
      if getattr(without, name) == getattr(experiment, name):
        continue
      without.validate()
      # the task first: configs of inputs may ask a store for a tokenizer
      if config_text(without.task(), 'task') == of_task() and configs_text(without) == text():
        found.append(name)
  return found


def _published(cls: type[Experiment], name: str) -> object:
  """Returns the value, or the rule, that an attribute has in the nearest class of paxlite."""
  ours = (base for base in cls.__mro__ if base.__module__.startswith('paxlite.'))
  return next((vars(base)[name] for base in ours if name in vars(base)), getattr(cls, name))
