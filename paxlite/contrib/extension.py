"""The extension for Pax: the experiments of its GPU scripts, and SeqIO tasks as datasets."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'contrib',
  hooks={'SeqioTask': 'paxlite.contrib.datasets:SeqioTask'},
  experiments=('paxlite.contrib.gpu.scripts_gpu',),
  former_modules={'paxlite.data.seqio_tasks': 'paxlite.contrib.seqio_tasks'},
)
