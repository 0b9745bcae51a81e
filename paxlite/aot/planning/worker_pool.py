"""Processes that judge candidates at the same time."""

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from paxlite.aot.planning.store import Verdict
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject, parsed


class WorkerPool:
  """Worker processes. Use it in a `with` statement, which ends them."""

  def __init__(self, command: Sequence[str], size: int, environment: Mapping[str, str]):
    """Starts nothing yet.

    Args:
      command: The arguments of paxlite.aot.planning.worker.
      size: Number of processes.
      environment: Their environment.
    """
    self._command = list(command)
    self._size = size
    self._environment = environment
    self._workers: list[_Worker] = []

  def __enter__(self) -> 'WorkerPool':
    return self

  def __exit__(self, *_: object) -> None:
    for worker in self._workers:
      worker.end()
    self._workers.clear()

  def describe(self) -> JsonObject:
    """Returns what the first process says of its devices.

    Raises:
      UserError: The process does not start.
    """
    return self._worker(0).described()

  def judge(self, asked: Sequence[Mapping[str, object]]) -> Iterator[tuple[int, Verdict]]:
    """Yields (position in `asked`, verdict) of experiments, in the order in which they are judged.

    Args:
      asked: `experiment`, `values` and `memory` of each experiment, as the worker reads them.
    """
    waiting: queue.Queue[int] = queue.Queue()
    done: queue.Queue[tuple[int, Verdict]] = queue.Queue()
    for i in range(len(asked)):
      waiting.put(i)

    def work(worker: _Worker) -> None:
      while True:
        try:
          i = waiting.get_nowait()
        except queue.Empty:
          return
        done.put((i, worker.judge(asked[i])))

    for i in range(min(self._size, len(asked))):
      threading.Thread(target=work, args=(self._worker(i),), daemon=True).start()
    for _ in asked:
      while True:
        try:
          yield done.get(timeout=0.2)  # so that Ctrl-C is noticed
          break
        except queue.Empty:
          continue

  def _worker(self, i: int) -> '_Worker':
    while len(self._workers) <= i:
      self._workers.append(_Worker(self._command, self._environment))
    return self._workers[i]


class _Worker:
  """One process, which is started again if it dies."""

  def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
    # -P: a file such as json.py in the current folder must not be imported
    self._command = [sys.executable, '-P', '-m', 'paxlite.aot.planning.worker', *command]
    self._environment = environment
    self._process: subprocess.Popen[str] | None = None
    self._description: JsonObject = {}

  def described(self) -> JsonObject:
    self._start()
    return self._description

  def judge(self, asked: Mapping[str, object]) -> Verdict:
    """Returns the verdict. If the process dies while it judges, the verdict holds an error."""
    try:
      self._start()
      process = self._process
      assert process is not None
      assert process.stdin is not None
      assert process.stdout is not None
      process.stdin.write(json.dumps(asked) + '\n')
      process.stdin.flush()
      line = process.stdout.readline()
    except (OSError, ValueError, UserError) as e:
      return Verdict(error=str(e))
    if not line:
      self.end()
      return Verdict(error='the process that compiled it ended: it may have had too little memory')
    found = parsed(line)
    return Verdict(**{**found, 'mfu': tuple(found['mfu'])})

  def _start(self) -> None:
    if self._process is not None:
      return
    package = str(pathlib.Path(__file__).parents[3])
    paths = os.pathsep.join(p for p in (package, self._environment.get('PYTHONPATH')) if p)
    self._process = subprocess.Popen(
      self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True, env={**self._environment, 'PYTHONPATH': paths}, start_new_session=True,
    )  # fmt: skip
    assert self._process.stdout is not None
    assert self._process.stderr is not None
    said: list[str] = []
    stderr = self._process.stderr
    reader = threading.Thread(target=lambda: said.extend(stderr), daemon=True)
    reader.start()
    line = self._process.stdout.readline()
    if not line:
      self._process.wait()
      reader.join(timeout=1)
      self._process = None
      errors = [x for x in said if x.strip()]
      last = errors[-1].strip() if errors else 'no message'
      raise UserError(f'a worker process of the planner does not start: {last}')
    self._description = parsed(line)

  def end(self) -> None:
    process, self._process = self._process, None
    if process is not None:
      process.kill()
      process.wait()
