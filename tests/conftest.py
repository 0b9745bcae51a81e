"""A compilation cache for the tests and the processes that they start: most compile the same."""

import os
import shutil
import tempfile

_CACHE = 'JAX_COMPILATION_CACHE_DIR'


def pytest_configure(config):
  if hasattr(config, 'workerinput'):  # a worker of xdist has its starter's environment
    return
  config.compilation_cache = tempfile.mkdtemp(prefix='paxlite-tests-')
  os.environ[_CACHE] = config.compilation_cache
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.3'


def pytest_unconfigure(config):
  if hasattr(config, 'compilation_cache'):
    shutil.rmtree(config.compilation_cache, ignore_errors=True)
