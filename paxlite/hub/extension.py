"""The extension for the Hugging Face Hub: its names in place of paths, and `export --push`."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'hub',
  needs=('weights',),
  hooks={'export --push': 'paxlite.hub.push:pushing'},
  hints={
    'weights': 'paxlite.hub.models:imported',
    'published weights': 'paxlite.hub.models:download_of',
    'files': 'paxlite.hub.datasets:files_of',
  },
)
