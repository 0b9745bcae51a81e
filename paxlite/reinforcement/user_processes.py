"""Calls functions of a user in processes, each call with a limit of time."""

import concurrent.futures
import json
import os
import pathlib
import queue
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed

_IMPORT_SECONDS = 300.0


class Call(NamedTuple):
  """A call of a function.

  Attributes:
    path: The dotted path of a function, or of a class, of which one object is made.
    method: The method of the object; None: the function itself.
    arguments: Its arguments, as JSON; None: it is only looked up.
  """

  path: str
  method: str | None
  arguments: Sequence[Any] | None


class UserProcesses:
  """A pool of processes that call functions by their dotted paths.

  Args:
    count: The number of processes.
    seconds: The most seconds of a call.

  Attributes:
    close: Ends the processes, which otherwise end with this object.
  """

  def __init__(self, count: int, seconds: float):
    self._seconds = seconds
    self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    self._workers = [_Worker() for _ in range(count)]
    for worker in self._workers:
      self._idle.put(worker)
    self._threads = concurrent.futures.ThreadPoolExecutor(count)
    self.close = weakref.finalize(self, _end, self._workers, self._threads)

  def results(self, calls: Sequence[Call]) -> list[Any]:
    """Returns the results of calls, in their order.

    Raises:
      UserError: A call raised, took too long, or ended its process.
    """
    return list(self._threads.map(self._result, calls))

  def look_up(self, calls: Sequence[Call]) -> None:
    """Has every process import what these calls name, for which there is more time.

    Raises:
      UserError: It is not there, or its module raises.
    """
    every = [(worker, call) for worker in self._workers for call in calls]
    for _ in self._threads.map(lambda pair: pair[0].result(pair[1], _IMPORT_SECONDS), every):
      pass

  def _result(self, call: Call) -> Any:
    worker = self._idle.get()
    try:
      return worker.result(call, self._seconds)
    finally:
      self._idle.put(worker)


class _Worker:
  """One process, which is started when it is first needed, and again after it was ended."""

  def __init__(self) -> None:
    self._process: subprocess.Popen[bytes] | None = None
    self._lock = threading.Lock()

  def result(self, call: Call, seconds: float) -> Any:
    """Returns the result of a call; see UserProcesses."""
    with self._lock:
      return self._result(call, seconds)

  def _result(self, call: Call, seconds: float) -> Any:
    name = call.path if call.method is None else f'{call.path}.{call.method}'
    process = self._started()
    assert process.stdin is not None
    try:
      process.stdin.write(json.dumps(call._asdict()).encode() + b'\n')
      process.stdin.flush()
      line = _line(process, seconds)
    except BrokenPipeError:
      line = b''
    if line is None:
      self.end()
      limit = '' if call.arguments is None else ' (REWARD_TIMEOUT)'
      raise UserError(f'{name} was not done after {seconds:g} seconds{limit}')
    if not line:
      code = process.wait()
      self._process = None
      raise UserError(f'{name} ended its process with the exit status {code}')
    answer = parsed(line)
    if 'error' in answer:
      raise UserError(f'{name} raised {answer["error"]}')
    return answer['result']

  def _started(self) -> subprocess.Popen[bytes]:
    if self._process is None or self._process.poll() is not None:
      paths = [str(pathlib.Path(__file__).parents[2]), os.environ.get('PYTHONPATH', '')]
      environment = os.environ | {
        'PYTHONPATH': os.pathsep.join(filter(None, paths)), 'JAX_PLATFORMS': 'cpu',
      }  # fmt: skip
      # -P: a file such as json.py in the current folder must not be imported
      self._process = subprocess.Popen(
        [sys.executable, '-P', '-m', 'paxlite.reinforcement.user_worker'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        start_new_session=True,  # Ctrl-C is for the run
      )  # fmt: skip
    return self._process

  def end(self) -> None:
    """Kills the process."""
    process, self._process = self._process, None
    if process is not None:
      process.kill()
      process.wait()
      for pipe in (process.stdin, process.stdout):
        if pipe is not None:
          pipe.close()


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
  """Returns the next line of a process; b'': it has ended; None: there is none in time."""
  assert process.stdout is not None
  end, found = time.monotonic() + seconds, b''
  with selectors.DefaultSelector() as selector:
    selector.register(process.stdout, selectors.EVENT_READ)
    while not found.endswith(b'\n'):
      if not selector.select(max(0, end - time.monotonic())):
        return None
      part = os.read(process.stdout.fileno(), 1 << 16)
      if not part:
        return b''
      found += part
  return found


def _end(workers: Sequence[_Worker], threads: concurrent.futures.ThreadPoolExecutor) -> None:
  """Ends the processes of a pool."""
  threads.shutdown(wait=False, cancel_futures=True)
  for worker in workers:
    worker.end()
