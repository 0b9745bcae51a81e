"""Makes the tests quick, in their own process and in the processes that they start.

The processes share a compilation cache, because most of them compile the same programs. It is kept
for the next session.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import unittest.mock

import pytest

from tests.support import kept_programs, runs, shards, tiers

_CACHE = 'JAX_COMPILATION_CACHE_DIR'
_ENDPOINTS = 'AWS_ENDPOINT_URL', 'AWS_METADATA_ENDPOINT', 'GOOGLE_BASE_URL', 'HF_ENDPOINT'
TESTS = pathlib.Path(__file__).parent
_NOHUP = 'PAXLITE_TESTS_NOHUP'
_WAITING = ('test_slurm',)  # modules that use hardly any processor time
_MOST_BYTES = 3 << 30  # of the memory of a worker, before its compiled programs are freed


def _resident_bytes() -> int:
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE')


def pytest_configure(config):
  signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for `make test &`
  if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
    os.environ[_NOHUP] = '1'  # for the workers of xdist
  if _NOHUP in os.environ:
    # SIG_IGN would be inherited by the processes that tests start, and a handler is not.
    signal.signal(signal.SIGHUP, lambda *_: None)
  if text := config.getoption('--shard'):
    config.pluginmanager.register(_Shard(text))
  sys.meta_path.insert(0, _TritonFirst())
  gc.set_threshold(200_000, 50, 100)  # tracing makes many objects, of which few are cycles
  if hasattr(config, 'workerinput'):  # a worker of xdist inherits the environment
    return
  os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # each process would compile paxlite's modules
  config.caches = tempfile.mkdtemp(prefix='paxlite-tests-')
  config.kept_programs = None
  os.environ[_CACHE] = config.caches
  # another session may have the folder, and the home folder may be read-only or missing
  with contextlib.suppress(OSError, RuntimeError):
    root = kept_programs.default_root()
    os.environ.setdefault('PIP_CACHE_DIR', str(root.parents[1] / 'pip'))  # that of the user
    config.kept_programs = kept_programs.KeptPrograms(root)
    os.environ[_CACHE] = str(config.kept_programs.folder)
  os.environ['XDG_CACHE_HOME'] = config.caches
  _compile_fast(config.option.markexpr)
  # no test reaches a cloud by accident
  nowhere = 'http://127.0.0.1:9'
  os.environ |= dict.fromkeys(_ENDPOINTS, nowhere)
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'


def _compile_fast(markexpr: str) -> None:
  """Compiles without LLVM's optimizations, which take half the time of most tests.

  `make test-exhaustive` compiles as users do, and so do tests for which XLA_FLAGS names a level.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if runs.LEVEL not in flags and markexpr != 'exhaustive':
    os.environ['XLA_FLAGS'] = f'{flags} {runs.LEVEL}=0'.lstrip()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
  """Runs the longest modules first, so that none of them runs alone at the end."""
  tiers.assign(items)
  longest = (
    'test_slurm', 'test_demo', 'test_docs', 'test_on_policy', 'test_meshes', 'test_smollm',
    'test_engine', 'test_recipes', 'test_training_api', 'test_rollouts', 'test_faults',
    'test_rollout_devices', 'test_adapters', 'test_model', 'test_packing', 'test_speculative',
    'test_stores', 'test_linear_attention', 'test_moe', 'test_installation', 'test_ahead_rollouts',
    'test_environments', 'test_te', 'test_families', 'test_whole_models', 'test_resume',
    'test_decoding', 'test_restoring', 'test_backends', 'test_reference', 'test_trainer',
    'test_weights', 'test_main', 'test_serving',
  )  # fmt: skip
  assert all(any(TESTS.glob(f'*/**/{name}.py')) for name in longest)
  order = {name: i for i, name in enumerate(longest)}
  items.sort(key=lambda item: order.get(item.path.stem, len(order)))


class _TritonFirst:
  """Imports Triton before TensorFlow, whichever test of a process comes first.

  Both contain an LLVM, and the process crashes if that of Triton, which torch's CUDA builds import,
  is loaded second.
  """

  def find_spec(self, name, path=None, target=None):
    if name == 'tensorflow':
      sys.meta_path.remove(self)
      with contextlib.suppress(ImportError):
        importlib.import_module('torch._dynamo')


def pytest_addoption(parser):
  parser.addoption('--shard', metavar='I/N', help='run the I-th of N parts of the chosen tests')


class _Shard:
  """Leaves out what is not in one of the parts, after `-m` has chosen."""

  def __init__(self, text):
    self.part, self.parts = shards.parsed(text)

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(self, config, items):
    ours = shards.chosen(items, self.part, self.parts)
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours


@contextlib.contextmanager
def _processor():
  """Waits until fewer tests than there are processors compute; more would slow each other down."""
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(os.environ['XDG_CACHE_HOME'])
    names = [folder / f'processor_{i}' for i in range(os.cpu_count() or 1)]
    files = [stack.enter_context(open(name, 'w')) for name in names]
    while True:
      for file in files:
        try:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
        except BlockingIOError:
          continue
        yield
        return
      time.sleep(0.005)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the timeout of a test starts after it
def pytest_runtest_protocol(item):
  with contextlib.nullcontext() if item.path.stem in _WAITING else _processor():
    return (yield)


@pytest.fixture(scope='module', autouse=True)
def programs_of_modules():
  """Frees the compiled programs once they fill memory, because those of all tests take 10 GB.

  Programs of single operations are shared by many modules, so that they are kept until then.
  """
  yield
  if 'jax' in sys.modules and _resident_bytes() > _MOST_BYTES:
    sys.modules['jax'].clear_caches()


@pytest.fixture(autouse=True)
def environment_of_a_test():
  """Restores the environment after a test, because tools set variables for their process."""
  with unittest.mock.patch.dict(os.environ):
    yield


@pytest.fixture
def gcs(monkeypatch, tmp_path):
  """A server of GCS with an empty bucket, whose address this process knows."""
  from tests.support.gcs_server import gcs_server

  with gcs_server('bkt') as server:
    for name, value in server.environment().items():
      monkeypatch.setenv(name, value)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    yield server


@pytest.fixture
def store(gcs):
  from paxlite.stores.object_store import ObjectStore

  return ObjectStore('gs://bkt')


def pytest_unconfigure(config):
  if hasattr(config, 'caches'):
    shutil.rmtree(config.caches, ignore_errors=True)
    if config.kept_programs is not None:
      with contextlib.suppress(OSError):  # a full disk: the next session compiles again
        config.kept_programs.close()
