"""The processes of a case that several processes train together, on one host."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.cases import Values, find

_RANK, _PORT = 'BENCHMARK_RANK', 'BENCHMARK_PORT'
_SECONDS = 60  # for the others to arrive


@contextlib.contextmanager
def joined(name: str, task: Values) -> Iterator[None]:
  """Starts the other processes of a case, if it has several, and connects them while it is open.

  Each process uses the device of its own number. A process that fails ends the others' connection,
  so that their error is reported; all are children of the worker, which ends them with itself.

  Args:
    name: The name of the case.
    task: The arguments of worker.measured.
  """
  count = find(name)[1].processes
  if count == 1:
    yield
    return
  import jax

  rank = int(os.environ.get(_RANK, 0))
  port = os.environ.get(_PORT) or _free_port()
  others = [] if rank else [_started(name, task, i, port) for i in range(1, count)]
  try:
    jax.distributed.initialize(
      f'127.0.0.1:{port}', count, rank, local_device_ids=[rank], initialization_timeout=_SECONDS
    )
    yield
    jax.distributed.shutdown()
    for other in others:
      other.wait(_SECONDS)
  finally:
    for other in others:
      other.kill()


def _started(name: str, task: Values, rank: int, port: str) -> subprocess.Popen:
  process = subprocess.Popen(
    [sys.executable, '-m', 'benchmarks.gpu', f'--serve={name}'],
    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    env=os.environ | {_RANK: str(rank), _PORT: port},
  )  # fmt: skip
  assert process.stdin is not None
  process.stdin.write(json.dumps(task) + '\n')
  process.stdin.close()
  return process


def _free_port() -> str:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return str(s.getsockname()[1])
