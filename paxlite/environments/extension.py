"""What environments of other packages add: names of their tasks in TRAIN_FILES."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'environments',
  needs=('finetuning',),
  hints={'files': 'paxlite.environments.sources:files_of'},
)
