"""JAX's coordination service in a separate process, which outlives process 0.

JAX runs the service in process 0. If process 0 dies, all others lose the service, and their agents
end them with SIGABRT within half a second, before they could log the reason. In a separate process
the service stays until the others have left by themselves (see peers.py).

    python -m paxlite.processes.coordinator HOST PROCESSES
"""

import contextlib
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from paxlite.core.errors import UserError

# Heartbeats are not needed: peers.py detects a process that is gone, and the watchdog one that
# hangs. A suspended process misses heartbeats, and its agent would then end it with SIGABRT.
HEARTBEAT_SECONDS = 24 * 3600
SHUTDOWN_SECONDS = 60  # the time that the first process to end waits for the last
_LINGER_SECONDS = 60.0  # after process 0 died; the others leave within a few seconds
_END = b'end\n'
_START_SECONDS = 120.0


class Coordinator:
  """A coordination service that has been started, or is starting.

  Args:
    host: The address on which it listens; '' means all addresses.
    processes: The number of processes that will connect.
  """

  def __init__(self, host: str, processes: int):
    self.port = 0  # set when the service is ready
    _free_port(host)  # Raises OSError if it is not an address of this machine.
    paths = [str(pathlib.Path(__file__).parents[2]), os.environ.get('PYTHONPATH', '')]
    self._child = subprocess.Popen(
      [sys.executable, '-P', '-m', 'paxlite.processes.coordinator', host, str(processes)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,  # gRPC logs every process that leaves.
      env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, paths))},
      start_new_session=True,  # Ctrl-C must not reach it.
    )

  def wait_until_ready(self) -> None:
    """Returns when the service listens.

    Raises:
      UserError: The service did not start.
    """
    assert self._child.stdout is not None
    ready, _, _ = select.select([self._child.stdout], [], [], _START_SECONDS)
    said = self._child.stdout.readline().strip() if ready else b''
    if not said.isdigit():
      ended = f'it ended with {self._child.poll()}' if ready else f'after {_START_SECONDS:.0f} s'
      raise UserError(f"JAX's coordination service, a process of its own, did not start: {ended}")
    self.port = int(said)

  def shutdown(self) -> None:
    """Ends the service; JAX calls this when all processes have announced that they leave."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
      self._child.communicate(_END, timeout=5)
    self._child.kill()

  @contextlib.contextmanager
  def used_by_jax(self) -> Iterator[None]:
    """A context in which JAX, in process 0, uses this service instead of starting its own."""
    from jax._src import distributed

    library: Any = distributed._jax
    real = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = lambda *args, **kwargs: self
    try:
      yield
    finally:
      library.get_distributed_runtime_service = real


def _free_port(host: str) -> int:
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  with socket.create_server((host, 0), family=family) as free:
    return free.getsockname()[1]


def _serve(host: str, processes: int) -> None:
  from jaxlib import _jax

  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # Process 0 decides when the service ends.
  name = f'[{host}]' if ':' in host else host or '[::]'
  for last in (False, False, True):  # Another program may take the port in between.
    port = _free_port(host)
    try:
      service = _jax.get_distributed_runtime_service(
        f'{name}:{port}',
        processes,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
      )
      break
    except Exception:
      if last:
        raise
  os.write(sys.stdout.fileno(), f'{port}\n'.encode())
  if sys.stdin.buffer.readline() == _END:
    service.shutdown()
  else:
    time.sleep(_LINGER_SECONDS)
  os._exit(0)


if __name__ == '__main__':
  _serve(sys.argv[1], int(sys.argv[2]))
