"""The extension for pipelines: a stack with layers split into stages."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'pipeline',
  hooks={'the mesh axis stage': 'paxlite.pipeline.pipeline:PipelinedTransformer'},
  former_modules={'paxlite.layers.pipeline': 'paxlite.pipeline'},
)
