"""Starts processes quickly, as forks of a process that has imported JAX and other packages.

A process of paxlite spends more than a second on imports. The server imports no module of paxlite,
and JAX has no device before a fork, so a child behaves like `python -m`. Variables that are read at
import must have the same values in server and child: see `serves`.
"""

import contextlib
import ctypes
import gc
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
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
_MODES = os.O_RDONLY, os.O_WRONLY, os.O_WRONLY  # of standard input, output and error
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

  def start(
    self, command: list[str], environment: dict[str, str], cwd: str, **pipes: int
  ) -> subprocess.Popen:
    """Works like subprocess.Popen(text=True) for [python, '-m', module, …]; the fork is a child."""
    return _Started(self, command, environment, cwd, **pipes)

  def fork_our_child(
    self, command: list[str], environment: dict[str, str], cwd: str, files: list[int]
  ) -> int:
    """Returns the process id of a fork whose standard input, output and error are `files`.

    The server forks twice, and a process whose parent has ended becomes a child of the nearest
    subreaper, which this process is for that moment.
    """
    paths = [os.devnull if f < 0 else f'/proc/{os.getpid()}/fd/{f}' for f in files]
    request = {'argv': command[2:], 'env': environment, 'cwd': cwd, 'files': paths}
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, ctypes.get_errno()
    try:
      self._socket.sendall(json.dumps(request).encode() + b'\n')
      return json.loads(self._answers.readline())
    finally:
      prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

  def run(
    self, command: list[str], environment: dict[str, str], cwd: str, timeout: float
  ) -> subprocess.CompletedProcess:
    """Works like subprocess.run(capture_output=True, text=True) for [python, '-m', module, …]."""
    folder = pathlib.Path(self._folder.name)
    outputs = [folder / 'stdout', folder / 'stderr']
    files = [os.devnull, *map(str, outputs)]
    for path in outputs:
      path.write_bytes(b'')
    request = {'argv': command[2:], 'env': environment, 'cwd': cwd, 'files': files, 'wait': True}
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
    return subprocess.CompletedProcess(command, code, *(path.read_text() for path in outputs))

  def close(self) -> None:
    self._answers.close()
    self._socket.close()
    self._process.wait(10)
    self._folder.cleanup()


class _Started(subprocess.Popen):
  """A fork of the server that is used like any other process."""

  def __init__(
    self,
    server: ForkServer,
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    **pipes: int,
  ):
    self._server = server
    super().__init__(command, env=environment, cwd=cwd, text=True, **pipes)

  def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
    _, _, _, *pipes = others[:9]  # after what only Windows has, and whether there is a shell
    stdin, _, _, stdout, _, stderr = pipes
    self.pid = self._server.fork_our_child(args, env, str(cwd), [stdin, stdout, stderr])
    self._child_created = True
    self._close_pipe_fds(*pipes)


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
  gc.collect()
  gc.freeze()  # a child's collections leave out what the server made, and do not copy its pages
  gc.set_threshold(200_000, 50, 100)  # tracing makes many objects, of which few are cycles
  requests = connection.makefile('r')
  while line := requests.readline():
    request = json.loads(line)
    # opened here: before the answer, after which our caller closes its ends of pipes
    opened = [os.open(path, mode) for path, mode in zip(request['files'], _MODES, strict=True)]
    pid = os.fork() if request.get('wait') else _fork_orphan()
    if pid == 0:
      return request | {'opened': opened}
    for fd in opened:
      os.close(fd)
    connection.sendall(f'{pid}\n'.encode())
    if request.get('wait'):
      _, status = os.waitpid(pid, 0)
      with contextlib.suppress(BrokenPipeError):
        connection.sendall(f'{status}\n'.encode())
  return None


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
  for number, fd in enumerate(request['opened']):
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
