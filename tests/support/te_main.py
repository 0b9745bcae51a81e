"""Runs paxlite.main with Transformer Engine on CPU."""

import sys

import tests.support.te_cpu  # noqa: F401
from paxlite.main import main

if __name__ == '__main__':
  sys.exit(main(sys.argv))
