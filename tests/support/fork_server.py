"""Starts processes quickly, as forks of a process that has imported JAX and other packages.

A process of paxlite spends more than a second on imports. The server imports no module of paxlite,
and JAX has no device before a fork, so a child behaves like `python -m`. Variables that are read at
import must have the same values in server and child: see `serves`.
"""

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile

_AT_IMPORT = ('JAX_', 'PYTHON', 'LD_', 'GLIBC_', 'MALLOC_')
_LATER = 'PYTHONPATH'  # a child adds it to sys.path


def serves(command: list[str], environment: dict[str, str], ours: dict[str, str]) -> bool:
  """Returns whether a fork can run a command: a module, with the same variables at import."""
  chosen = lambda e: {k: v for k, v in e.items() if k.startswith(_AT_IMPORT) and k != _LATER}
  return command[1] == '-m' and chosen(environment) == chosen(ours)


class ForkServer:
  """A running server, and the environment that it was started in.

  `imported` names more packages, apart by commas, that the server imports for its forks.
  """

  def __init__(self, environment: dict[str, str], imported: str = ''):
    self.environment = environment
    self._folder = tempfile.TemporaryDirectory(prefix='paxlite-fork-')
    self._socket, theirs = socket.socketpair()
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'tests.support.fork_server', str(theirs.fileno()), imported],
      env=environment, pass_fds=[theirs.fileno()],
      cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    theirs.close()
    self._answers = self._socket.makefile('r')

  def run(
    self, command: list[str], environment: dict[str, str], cwd: str, timeout: float
  ) -> subprocess.CompletedProcess:
    """Works like subprocess.run(capture_output=True, text=True) for [python, '-m', module, …]."""
    folder = pathlib.Path(self._folder.name)
    request = {'argv': command[2:], 'env': environment, 'cwd': str(cwd), 'folder': str(folder)}
    self._socket.sendall(json.dumps(request).encode() + b'\n')
    pid = json.loads(self._answers.readline())
    self._socket.settimeout(timeout)
    try:
      status = json.loads(self._answers.readline())
    except TimeoutError:
      os.kill(pid, signal.SIGKILL)
      raise subprocess.TimeoutExpired(command, timeout) from None
    finally:
      self._socket.settimeout(None)
    code = os.waitstatus_to_exitcode(status)
    stdout, stderr = ((folder / name).read_text() for name in ('stdout', 'stderr'))
    return subprocess.CompletedProcess(command, code, stdout, stderr)

  def close(self) -> None:
    self._answers.close()
    self._socket.close()
    self._process.wait(10)
    self._folder.cleanup()


def _serve(connection: socket.socket) -> dict | None:
  """Answers requests; returns None, or in a child its own request."""
  import absl.app  # noqa: F401
  import fiddle.printing
  import fiddle.selectors  # noqa: F401
  import flax.linen  # noqa: F401
  import jax.experimental.multihost_utils  # noqa: F401
  import numpy.random  # noqa: F401
  import optax  # noqa: F401
  import orbax.checkpoint  # noqa: F401
  import rich.live  # noqa: F401
  import tensorstore  # noqa: F401

  for name in filter(None, sys.argv[2].split(',')):
    importlib.import_module(name)
  requests = connection.makefile('r')
  while line := requests.readline():
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
      return request
    connection.sendall(f'{pid}\n'.encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
      connection.sendall(f'{status}\n'.encode())
  return None


def _become(request: dict) -> str:
  """Gives this process a request's environment, folder, files and arguments; returns its module."""
  os.environ.clear()
  os.environ.update(request['env'])
  os.chdir(request['cwd'])
  for number, name in ((0, None), (1, 'stdout'), (2, 'stderr')):
    path = os.devnull if name is None else os.path.join(request['folder'], name)
    fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if name else 0), 0o600)
    os.dup2(fd, number)
    os.close(fd)
  module, *flags = request['argv']
  sys.argv = sys.orig_argv = [module, *flags]
  paths = os.environ.get(_LATER, '').split(os.pathsep)
  sys.path[:1] = [request['cwd'], *filter(None, paths)]
  return module


if __name__ == '__main__':
  with socket.socket(fileno=int(sys.argv[1])) as connection:
    request = _serve(connection)
  if request is not None:
    name = _become(request)
    runpy.run_module(name, run_name='__main__', alter_sys=True)
