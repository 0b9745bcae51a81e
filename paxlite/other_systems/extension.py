"""The extension for names of Pax, MaxText, transformers, TRL and seqax: hints for their users."""

from paxlite.core.extension import Extension

_NAMES = 'paxlite.other_systems.other_names'
EXTENSION = Extension(
  'other_systems',
  hints={
    'arguments of a run': f'{_NAMES}:left_out', 'attribute': f'{_NAMES}:attribute_hint',
    'experiment': f'{_NAMES}:experiment_hint', 'flag': f'{_NAMES}:flag_hint',
    'mode': f'{_NAMES}:mode_hint', 'path': f'{_NAMES}:path_here',
    'words': f'{_NAMES}:arguments_hint', 'command line': f'{_NAMES}:understood',
  },
)  # fmt: skip
