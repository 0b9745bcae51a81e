"""Finds values that a user has set and that change nothing, because other values leave them out."""

import contextlib

from paxlite.core.attribute_kinds import Kind
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.description import configs_text

# A permission, and what matters to data, to prompts and to initial values, which no config of the
# model holds.
_NOT_OF_CONFIGS = {'HEADS_SPAN_MODEL', 'START_ID', 'SEED', 'MAX_SEQ_LEN', 'PACKED_INPUT'}


def without_effect(experiment: Experiment) -> list[str]:
  """Returns the attributes of model and training that were set on this object, and change nothing.

  An attribute changes nothing if the configs that the experiment makes are the same with the value
  of its class, and the remarks and refusals of `validate` are not about it.
  """
  cls, found = type(experiment), []
  values = {name: value for name, value in vars(experiment).items() if name.isupper()}
  for name in experiment.values_of(Kind.SHAPE, Kind.FUNCTION, Kind.TRAINING):
    if name not in values or name in _NOT_OF_CONFIGS or name.startswith('CHECKPOINT_'):
      continue
    others = {other: value for other, value in values.items() if other != name}
    with contextlib.suppress(UserError):
      without = cls(**others)
      if getattr(without, name) == values[name]:
        continue
      without.validate()
      if configs_text(without) == configs_text(experiment):
        found.append(name)
  return found
