"""Worker processes that encode blocks of records; results come in the order of the blocks."""

import collections
import concurrent.futures
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from paxlite.core.errors import UserError

Block = TypeVar('Block')
After = TypeVar('After')
Result = TypeVar('Result')

_SAFE_PATH = 'PYTHONSAFEPATH'


def usable_cores() -> int:
  """Returns how many cores this process may use."""
  return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def workers(
  make: Callable[[], Callable[[Block], Result]], processes: int, way_out: str
) -> Iterator[Callable[[Iterator[tuple[Block, After]]], Iterator[tuple[Result, After]]]]:
  """Yields a function that encodes blocks, each with what belongs to it, in their order.

  Raises UserError if a worker was killed; or what a worker raised, raised where its result is due.

  Args:
    make: Returns what encodes a block. Every worker process calls it once, so it can be pickled.
    processes: Number of processes; 1: this one.
    way_out: Says what to do after a worker was killed.
  """
  if processes == 1:
    encode = make()
    yield lambda blocks: ((encode(block), after) for block, after in blocks)
    return
  executor = concurrent.futures.ProcessPoolExecutor(
    processes, multiprocessing.get_context('spawn'), _start_worker, (make,)
  )
  try:
    yield lambda blocks: _in_order(executor, blocks, 4 * processes)
  except BrokenProcessPool:
    raise UserError(f'a worker was killed, possibly out of memory: {way_out}') from None
  finally:
    executor.shutdown(cancel_futures=True)


def _in_order(
  executor: concurrent.futures.Executor, blocks: Iterator[tuple[Block, After]], ahead: int
) -> Iterator[tuple[Any, After]]:
  """Yields the results in the order of the blocks; reads at most `ahead` blocks in advance."""
  pending: collections.deque[tuple[concurrent.futures.Future[Any], After]] = collections.deque()

  def submit(count: int) -> None:
    for block, after in itertools.islice(blocks, count):
      with _starting():  # a submission may start a process
        pending.append((executor.submit(_encode, block), after))

  submit(ahead)
  while pending:
    future, after = pending.popleft()
    yield future.result(), after
    submit(1)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
  """A context in which a new process imports nothing from the current folder.

  Neither does it run the script of a user again, as processes do that are spawned.
  """
  script, before = sys.modules['__main__'], os.environ.get(_SAFE_PATH)
  sys.modules['__main__'], os.environ[_SAFE_PATH] = types.ModuleType('__main__'), '1'
  try:
    yield
  finally:
    sys.modules['__main__'] = script
    os.environ.pop(_SAFE_PATH) if before is None else os.environ.update({_SAFE_PATH: before})


_worker: Callable[[Any], Any]


def _encode(block: Any) -> Any:
  return _worker(block)


def _start_worker(make: Callable[[], Callable[[Any], Any]]) -> None:
  global _worker
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # the workers use all cores
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
  logging.disable(logging.WARNING)  # which the parent has said
  threading.Thread(target=_end_with_parent, daemon=True).start()
  _worker = make()


def _end_with_parent() -> None:
  """Ends a worker with its parent; without this, workers of a killed parent wait for ever."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)
