"""Calls functions of a user in processes, each call with a limit of time."""

import concurrent.futures
import contextlib
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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import paxlite
from paxlite.core.child_processes import kill_group
from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed

IMPORT_SECONDS = 300.0
_MOST_BYTES = 4 << 20  # of a result, which is a number or a message
_END_SECONDS = 1.0  # in which a process that has closed its output tells its exit status


class Call(NamedTuple):
  """A call of a function.

  Attributes:
    path: The dotted path of a function, or of a class, of which one object is made.
    method: The method of the object; None: the function itself.
    arguments: Its arguments, as JSON; None: it is only looked up.
    about: What the call is about, for messages.
  """

  path: str
  method: str | None
  arguments: Sequence[Any] | None
  about: str = ''


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
    return self._all(self._result, calls)

  def outcomes(self, calls: Sequence[Call]) -> list[Any]:
    """Returns the results of calls, with a UserError in the place of each one that failed."""
    return self._all(self._outcome, calls)

  def look_up(self, calls: Sequence[Call]) -> None:
    """Makes every process import what these calls name, with a longer time limit.

    Raises:
      UserError: It is not there, or its module raises.
    """
    every = [(worker, call) for worker in self._workers for call in calls]
    try:
      self._all(lambda pair: pair[0].result(pair[1], IMPORT_SECONDS), every)
      for worker in self._workers:
        worker.named = calls
    except BaseException:
      self.close()  # others may import for minutes
      raise

  def _all(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Returns the results of calls in threads; the first error ends the calls under way."""
    futures = [self._threads.submit(function, value) for value in values]
    try:
      concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
      for future in futures:
        if future.done() and (error := future.exception()):
          raise error
      return [future.result() for future in futures]
    except BaseException:
      for future in futures:
        future.cancel()
      for worker in self._workers:
        worker.interrupt()
      raise

  def _result(self, call: Call) -> Any:
    worker = self._idle.get()
    try:
      return worker.result(call, self._seconds)
    finally:
      self._idle.put(worker)

  def _outcome(self, call: Call) -> Any:
    try:
      return self._result(call)
    except UserError as e:
      return e


class _Worker:
  """One process, which is started when it is first needed, and again after it was ended."""

  def __init__(self) -> None:
    self._process: subprocess.Popen[bytes] | None = None
    self._lock = threading.Lock()
    self._interrupted = self._closed = False
    self.named: Sequence[Call] = ()  # what a new process imports before its first call

  def result(self, call: Call, seconds: float) -> Any:
    """Returns the result of a call; see UserProcesses."""
    with self._lock:
      if self._interrupted:
        self._end()
      self._interrupted = self._closed
      return self._result(call, seconds)

  def _result(self, call: Call, seconds: float) -> Any:
    if self._process is not None and self._process.poll() is not None:
      self._end()
    if self._process is None:
      for named in self.named:
        self._exchanged(named, IMPORT_SECONDS)
    return self._exchanged(call, seconds)

  def _exchanged(self, call: Call, seconds: float) -> Any:
    name = call.path if call.method is None else f'{call.path}.{call.method}'
    name += f' for {call.about}' if call.about else ''
    process = self._started()
    if self._interrupted:  # while it was started
      kill_group(process.pid)
    assert process.stdin is not None
    try:
      process.stdin.write(json.dumps(call._asdict()).encode() + b'\n')
      process.stdin.flush()
      line = _line(process, seconds)
    except BrokenPipeError:
      line = b''
    if line is None:
      self._end()
      limit = '' if call.arguments is None else ' (REWARD_TIMEOUT)'
      raise UserError(f'{name} did not finish within {seconds:g} seconds{limit}')
    if not line:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
      raise UserError(f'{name} ended its process with the exit status {self._end()}')
    if len(line) > _MOST_BYTES:
      self._end()
      raise UserError(f'{name} returned more than {_MOST_BYTES >> 20} MiB')
    answer = parsed(line)
    if 'error' in answer:
      raise UserError(f'{name} raised {answer["error"]}')
    return answer['result']

  def _started(self) -> subprocess.Popen[bytes]:
    if self._process is None:
      paths = [str(pathlib.Path(paxlite.__file__).parents[1]), os.environ.get('PYTHONPATH', '')]
      environment = os.environ | {
        'PYTHONPATH': os.pathsep.join(filter(None, paths)), 'JAX_PLATFORMS': 'cpu',
        'PYTHONHASHSEED': '0',  # what a set is iterated in is the same in each process
      }  # fmt: skip
      # -P: a file such as json.py in the current folder must not be imported
      self._process = subprocess.Popen(
        [sys.executable, '-P', '-m', 'paxlite.finetuning.reinforcement.user_worker'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        start_new_session=True,  # Ctrl-C is for the run, and what a reward starts ends with it
      )  # fmt: skip
    return self._process

  def interrupt(self) -> None:
    """Kills the process, so that a call under way fails at once."""
    self._interrupted = True
    if (process := self._process) is not None:
      kill_group(process.pid)

  def close(self) -> None:
    """Ends the process; nothing is called afterwards."""
    self._closed = True
    self.interrupt()
    with self._lock:  # the thread that reads from its pipes has noticed
      self._end()

  def _end(self) -> int | None:
    """Kills the process with all that it has started; returns its exit status."""
    process, self._process = self._process, None
    if process is None:
      return None
    kill_group(process.pid)
    for pipe in (process.stdin, process.stdout):
      if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
          pipe.close()
    return process.wait()


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
  """Returns the next line of a process, or the beginning of one that is too long.

  b'': the process has ended; None: there is none in time.
  """
  assert process.stdout is not None
  end, found = time.monotonic() + seconds, b''
  with selectors.DefaultSelector() as selector:
    selector.register(process.stdout, selectors.EVENT_READ)
    while not found.endswith(b'\n') and len(found) <= _MOST_BYTES:
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
    worker.close()
