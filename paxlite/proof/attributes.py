"""The attribute of runs that verify their own steps."""

from paxlite.config.attribute_kinds import OffAtZeroInt, Run
from paxlite.experiments.parts.part import Part


class Verification(Part, subject='Training loop'):
  """Wrong bits of a device: see docs/verifying.md."""

  VERIFY_EVERY_N_STEPS: Run[OffAtZeroInt] = 0  # repeats one step in N and compares bits; 0: never
