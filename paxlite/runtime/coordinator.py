"""JAX's coordination service in a process of its own, which outlives process 0.

JAX runs the service in process 0. Where that one dies, all others lose the service, and their
agents end them with SIGABRT within half a second, before anybody could say why. In a process of its
own it is there until the others have left by themselves (see peers.py).

    python -m paxlite.runtime.coordinator ADDRESS PROCESSES
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

# Nobody waits for heartbeats: peers.py notices who is gone, and the watchdog who hangs. An agent
# that missed some, because its process was suspended, would end it with SIGABRT.
HEARTBEAT_SECONDS = 24 * 3600
SHUTDOWN_SECONDS = 60  # for which the first to end waits for the last
_LINGER_SECONDS = 60.0  # after process 0 has died; the others leave within a few seconds
_READY, _END = b'ready\n', b'end\n'


class Coordinator:
  """A coordination service that has been started, or is starting.

  Args:
    host: The address on which it listens; '' is all of them.
    processes: How many will connect.
  """

  def __init__(self, host: str, processes: int):
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as free:
      self.port: int = free.getsockname()[1]
    name = f'[{host}]' if ':' in host else host or '[::]'
    paths = [str(pathlib.Path(__file__).parents[1]), os.environ.get('PYTHONPATH', '')]
    self._child = subprocess.Popen(
      [
        sys.executable,
        '-P',
        '-m',
        'paxlite.runtime.coordinator',
        f'{name}:{self.port}',
        str(processes),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,  # lines of gRPC about processes that leave
      env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, paths))},
      start_new_session=True,  # Ctrl-C is not for it
    )

  def wait_until_ready(self) -> None:
    """Returns when it listens.

    Raises:
      RuntimeError: it does not.
    """
    assert self._child.stdout is not None
    if self._child.stdout.readline() != _READY:
      raise RuntimeError(f"JAX's coordination service cannot listen on port {self.port}")

  def shutdown(self) -> None:
    """Ends it; called by JAX when all processes have said that they leave."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
      self._child.communicate(_END, timeout=5)
    self._child.kill()

  @contextlib.contextmanager
  def used_by_jax(self) -> Iterator[None]:
    """A context in which JAX, as process 0, takes this for the service that it would start."""
    from jax._src import distributed

    library: Any = distributed._jax
    real = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = lambda *args, **kwargs: self
    try:
      yield
    finally:
      library.get_distributed_runtime_service = real


def _serve(address: str, processes: int) -> None:
  from jaxlib import _jax

  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # process 0 says when it is over
  service = _jax.get_distributed_runtime_service(
    address,
    processes,
    heartbeat_timeout=HEARTBEAT_SECONDS,
    shutdown_timeout=SHUTDOWN_SECONDS,
  )
  os.write(sys.stdout.fileno(), _READY)
  if sys.stdin.buffer.readline() == _END:
    service.shutdown()
  else:
    time.sleep(_LINGER_SECONDS)
  os._exit(0)


if __name__ == '__main__':
  _serve(sys.argv[1], int(sys.argv[2]))
