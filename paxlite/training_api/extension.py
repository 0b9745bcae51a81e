"""The extension for `paxlite serve --train`."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'training_api',
  needs=('serving', 'adapters', 'weights', 'finetuning'),
  hooks={'serve --train': 'paxlite.training_api.service:service'},
)
