"""Makes the tests quick, in their own process and in the processes that they start.

The processes share a compilation cache, because most of them compile the same programs. XLA
compiles without LLVM's optimizations, which take half of the time and only matter at larger sizes.
"""

import os
import shutil
import signal
import sys
import tempfile
import unittest.mock

import pytest

from tests.support import runs

_CACHE = 'JAX_COMPILATION_CACHE_DIR'


def pytest_configure(config):
  signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for `make test &`
  if hasattr(config, 'workerinput'):  # a worker of xdist inherits the environment
    return
  config.compilation_cache = tempfile.mkdtemp(prefix='paxlite-tests-')
  os.environ[_CACHE] = config.compilation_cache
  os.environ['XDG_CACHE_HOME'] = config.compilation_cache
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.3'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {runs.QUICK_TO_COMPILE}'


def pytest_collection_modifyitems(items):
  """Runs the longest tests first, so that none of them runs alone at the end."""
  longest = 'test_demo', 'test_slurm', 'test_smollm', 'test_faults', 'test_meshes', 'test_te'
  order = {name: i for i, name in enumerate(longest)}
  items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope='module', autouse=True)
def programs_of_a_module():
  """Frees the compiled programs of a module, because those of all tests take 10 GB or more."""
  yield
  if 'jax' in sys.modules:
    sys.modules['jax'].clear_caches()


@pytest.fixture(autouse=True)
def environment_of_a_test():
  """Restores the environment after a test, because tools set variables for their process."""
  with unittest.mock.patch.dict(os.environ):
    yield


def pytest_unconfigure(config):
  if hasattr(config, 'compilation_cache'):
    shutil.rmtree(config.compilation_cache, ignore_errors=True)
