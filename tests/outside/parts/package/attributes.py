"""An attribute of all experiments."""

from paxlite.config.attribute_kinds import OffAtZeroInt, Run
from paxlite.experiments.parts.part import Part


class Budget(Part, subject='Budget'):
  STEP_BUDGET: Run[OffAtZeroInt] = 0  # steps of all starts after which training ends
