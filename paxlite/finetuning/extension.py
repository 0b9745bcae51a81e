"""What fine-tuning adds: values of frozen models in the rows of a run."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'finetuning',
  callbacks=('paxlite.finetuning.reference_values:callbacks',),
  inputs=('paxlite.finetuning.reference_values:fill',),
)
