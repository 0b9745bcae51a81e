"""Makes system calls fail in child processes: failing_calls.c is compiled and preloaded."""

import pathlib
import shutil
import subprocess

import pytest

NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which('gcc') is None, reason='needs gcc')


def library(folder: pathlib.Path) -> str:
  """Compiles the library into `folder` and returns its path."""
  path = folder / 'failing_calls.so'
  source = pathlib.Path(__file__).with_suffix('.c')
  subprocess.run(['gcc', '-shared', '-fPIC', '-o', path, source, '-ldl'], check=True)
  return str(path)


def environment(
  library: str, call: str, path: str, number: int, times: int = 1 << 30, exists: str = ''
) -> dict[str, str]:
  """Returns an environment in which `call` fails with errno `number` if a path contains `path`.

  If `exists` is given, it fails only while there is a file of this name.
  """
  return {
    'LD_PRELOAD': library,
    'FAILING_CALL': call,
    'FAILING_PATH': path,
    'FAILING_ERRNO': str(number),
    'FAILING_TIMES': str(times),
    **({'FAILING_WHILE': exists} if exists else {}),
  }
