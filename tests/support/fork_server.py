"""Starts processes quickly, as forks of a process that has imported JAX, paxlite and others.

A process of paxlite spends more than two seconds on imports. JAX has no device before a fork, so a
child does what `python -m` does, but for three things: its garbage collector runs less often, all
experiments are registered before a user's module is imported, and an import that fails in a new
process is not noticed. Tests of these start a process of their own. Variables that are read at
import must have the same values in server and child: see `serves`.
"""

import ctypes
import gc
import importlib
import inspect
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys

_AT_IMPORT = ('JAX_', 'PYTHON', 'LD_', 'GLIBC_', 'MALLOC_')
_LATER = 'PYTHONPATH'  # a child adds it to sys.path
_MOST_BYTES = 1 << 18  # of a request
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


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
    self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'tests.support.fork_server', str(theirs.fileno()), imported],
      env=environment, pass_fds=[theirs.fileno()],
      cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    theirs.close()

  def start(
    self,
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
  ) -> subprocess.Popen:
    """Works like subprocess.Popen(text=True) for [python, '-m', module, …]; the fork is a child."""
    return _Started(self, command, environment, cwd, stdin, stdout, stderr)

  def fork_our_child(
    self, command: list[str], environment: dict[str, str], cwd: str, files: list[int]
  ) -> int:
    """Returns the process id of a fork whose standard input, output and error are `files`.

    The server forks twice, and a process whose parent has ended becomes a child of the nearest
    subreaper, which this process is for that moment.
    """
    request = json.dumps({'argv': command[2:], 'env': environment, 'cwd': cwd}).encode()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, ctypes.get_errno()
    try:
      socket.send_fds(self._socket, [request], files)
      answer = self._socket.recv(32)
    finally:
      prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert answer, 'the fork server has ended'
    return int(answer)

  def close(self) -> None:
    self._socket.close()
    self._process.wait(10)


class _Started(subprocess.Popen):
  """A fork of the server that is used like any other process."""

  def __init__(
    self,
    server: ForkServer,
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    *files: int | None,
  ):
    self._server = server
    stdin, stdout, stderr = files
    super().__init__(
      command, env=environment, cwd=cwd, text=True, stdin=stdin, stdout=stdout, stderr=stderr
    )

  def _execute_child(self, *arguments):
    given = _OF_EXECUTE_CHILD.bind(self, *arguments).arguments
    files = [given[name] for name in ('p2cread', 'c2pwrite', 'errwrite')]
    files = [i if fd == -1 else fd for i, fd in enumerate(files)]  # -1: the child has ours
    args, env, cwd = (given[name] for name in ('args', 'env', 'cwd'))
    self.pid = self._server.fork_our_child(args, env, str(cwd), files)
    self._child_created = True
    ends = 'p2cread', 'p2cwrite', 'c2pread', 'c2pwrite', 'errread', 'errwrite'
    self._close_pipe_fds(*(given[name] for name in ends))


_OF_EXECUTE_CHILD = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def _serve(connection: socket.socket) -> dict | None:
  """Answers requests; returns None, or in a child its own request."""
  import absl.app  # noqa: F401
  import fiddle.printing
  import fiddle.selectors  # noqa: F401
  import flax.linen  # noqa: F401
  import jax.experimental.multihost_utils
  import jax.experimental.serialize_executable  # noqa: F401
  import jaxlib.mlir.dialects.mhlo  # noqa: F401
  import numpy.random  # noqa: F401
  import optax  # noqa: F401
  import orbax.checkpoint  # noqa: F401
  import rich.live  # noqa: F401
  import tensorstore  # noqa: F401

  import paxlite.programs.launch
  import paxlite.programs.training  # noqa: F401
  from paxlite.experiments import registry

  registry.experiments()

  for name in filter(None, sys.argv[2].split(',')):
    importlib.import_module(name)
  gc.collect()
  gc.freeze()  # a child's collections leave out what the server made, and do not copy its pages
  gc.set_threshold(200_000, 50, 100)  # tracing makes many objects, of which few are cycles
  while True:
    request, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    if not request:
      return None
    pid = _fork_orphan()
    if pid == 0:
      return json.loads(request) | {'files': files}
    for fd in files:
      os.close(fd)
    connection.send(str(pid).encode())


def _fork_orphan() -> int:
  """Forks a process whose parent ends at once; returns its process id, or 0 in that process."""
  reader, writer = os.pipe()
  between = os.fork()
  if between == 0:
    pid = os.fork()
    if pid == 0:
      os.close(reader)
      os.close(writer)
      return 0
    os.write(writer, str(pid).encode())
    os._exit(0)
  os.close(writer)
  pid = int(os.read(reader, 32))
  os.close(reader)
  os.waitpid(between, 0)
  return pid


def _become(request: dict) -> str:
  """Gives this process a request's environment, folder, files and arguments; returns its module."""
  os.environ.clear()
  os.environ.update(request['env'])
  os.chdir(request['cwd'])
  for number, fd in enumerate(request['files']):
    os.dup2(fd, number)
    os.close(fd)
  # the server's streams remember whether its files can seek
  sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
  sys.stdout = sys.__stdout__ = open(1, 'w', closefd=False)  # noqa: SIM115
  sys.stderr = sys.__stderr__ = open(2, 'w', 1, errors='backslashreplace', closefd=False)  # noqa: SIM115
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
