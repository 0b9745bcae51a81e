"""The extension for TRACKERS."""

from paxlite.core.extension import Extension

EXTENSION = Extension(
  'trackers',
  hooks={'TRACKERS': 'paxlite.trackers.services:trackers'},
  former_modules={'paxlite.tracking.trackers': 'paxlite.trackers.services'},
)
