"""The attributes of local checkpoints."""

from paxlite.config.attribute_kinds import OffAtZeroInt, Run
from paxlite.config.attributes import LocalPath
from paxlite.experiments.parts.part import Part


class LocalCheckpointing(
  Part, subject='Checkpoints', beside={'LOCAL_CHECKPOINT_EVERY_N_STEPS': 'LOCAL_CHECKPOINT_DIR'}
):
  """Local checkpoints on the disks of a run's machines."""

  LOCAL_CHECKPOINT_EVERY_N_STEPS: Run[OffAtZeroInt] = (
    0  # maximum steps lost in a crash; each host saves locally every N / 2; 0: off
  )
  LOCAL_CHECKPOINT_DIR: Run[LocalPath] = ''  # folder of local checkpoints; '': /dev/shm
