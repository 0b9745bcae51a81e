"""The extension for local checkpoints: LOCAL_CHECKPOINT_EVERY_N_STEPS, and its callback."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'local_checkpoints',
  parts=('paxlite.local_checkpoints.attributes:LocalCheckpointing',),
  callbacks=('paxlite.local_checkpoints.callbacks:callbacks',),
)
