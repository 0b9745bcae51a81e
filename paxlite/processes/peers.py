"""Detects at once that another process of a run is gone, and knows which process is behind.

JAX's heartbeats need half a minute for that and end the process with SIGABRT, and a collective
whose peer is gone may wait for ever. Here every process keeps its connection to process 0 (see
rendezvous.py), and the kernel closes it when a process ends, however it ends. When process 0 loses
a connection, it sends the number of the lost process to the others and leaves. The others leave
when they get this message or lose process 0.
"""

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from paxlite.cli.terminal import settle, warn
from paxlite.core.errors import EXIT_AGAIN, Interrupted, TrainingError
from paxlite.processes.rendezvous import received

_GRACE_SECONDS = 2  # If all processes fail alike, each reports its error and exit code.
# A host that loses power closes no connection: it counts as gone after this many seconds of silence
# and this many unanswered probes.
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 10, 'TCP_KEEPCNT': 3}
_UNANSWERED_MS = {'TCP_USER_TIMEOUT': 40_000}
_GOODBYE, _LOST, _AT = b'.', b'!', b'@'
_LOST_FORMAT = struct.Struct('>I')  # the number of a process
_AT_FORMAT = struct.Struct('>Q32s')  # the progress of a process, and its phase


class Peers:
  """A context in which the process leaves with EXIT_AGAIN when another one is gone.

  Args:
    connections: Connections by process number: process 0 has one to each other process, and any
      other process has one to process 0. There are none in a run of one process.
    process: The number of this process.
    count: The number of processes.
  """

  def __init__(
    self, connections: Mapping[int, socket.socket] | None = None, process: int = 0, count: int = 1
  ):
    self._connections = {c: i for i, c in (connections or {}).items()}
    self._process = process
    self._count = count
    self._leaving = False
    self._at: dict[int, tuple[int, str]] = {}
    for connection in self._connections:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
      for option, value in (_KEEPALIVE | _UNANSWERED_MS).items():
        if hasattr(socket, option):  # only on Linux
          connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

  @property
  def alone(self) -> bool:
    """Whether this is a run of one process."""
    return self._count == 1

  def watch(self) -> None:
    """Starts to watch in a thread, until the context ends."""
    if self._connections:
      _delay_aborts()
      threading.Thread(target=self._watch, name='peers', daemon=True).start()

  def __enter__(self) -> 'Peers':
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._leaving = True
    for connection in self._connections:
      with contextlib.suppress(OSError):  # The other process has left already.
        if kind is None or issubclass(kind, (Interrupted, TrainingError)):  # all have these
          connection.sendall(_GOODBYE)
        else:
          connection.shutdown(socket.SHUT_RDWR)

  def report(self, progress: int, phase: str) -> None:
    """Sends the progress of this process (a growing number) and its phase to process 0."""
    if self._process != 0:
      message = _AT + _AT_FORMAT.pack(progress, phase.encode()[:32])
      for connection in self._connections:
        with contextlib.suppress(OSError):
          connection.sendall(message)

  def behind(self, progress: int) -> dict[int, str]:
    """Returns the phases of the processes behind this one; only process 0 knows them."""
    if self._process != 0:
      return {}
    found = {i: self._at.get(i, (-1, 'starting')) for i in self._connections.values()}
    return {i: phase for i, (at, phase) in sorted(found.items()) if at < progress}

  def _watch(self) -> None:
    with selectors.DefaultSelector() as selector:
      for connection in self._connections:
        selector.register(connection, selectors.EVENT_READ, connection)
      while selector.get_map():
        for key, _ in selector.select():
          if not self._hear(key.data):
            selector.unregister(key.data)

  def _hear(self, connection: socket.socket) -> bool:
    """Receives a message; returns whether there may be another one."""
    process = self._connections[connection]
    try:
      kind = received(connection, 1)
      if kind == _AT:
        at, phase = _AT_FORMAT.unpack(received(connection, _AT_FORMAT.size))
        self._at[process] = at, phase.rstrip(b'\0').decode(errors='replace')
        return True
      lost = process
      if kind == _LOST:
        (lost,) = _LOST_FORMAT.unpack(received(connection, _LOST_FORMAT.size))
    except (OSError, EOFError):
      kind, lost = b'', process
    if kind != _GOODBYE and not self._leaving:
      self._leave(lost)
    return False

  def _leave(self, lost: int) -> None:
    if self._process == 0:
      for connection in self._connections:
        with contextlib.suppress(OSError):
          connection.sendall(_LOST + _LOST_FORMAT.pack(lost))
    time.sleep(_GRACE_SECONDS)
    if self._leaving:
      return
    warn(f'stopped: process {self._process} of {self._count}: process {lost} is gone')
    settle()
    os._exit(EXIT_AGAIN)


def _delay_aborts() -> None:
  """Makes a thread that calls abort() wait before the process ends with SIGABRT.

  When a peer is gone, gloo may throw where nobody catches, and JAX's coordination agent aborts. The
  watching thread then says who is gone, and ends the process with EXIT_AGAIN. The handler is libc's
  sleep(), whose argument is the number of the signal: 6 seconds, longer than _GRACE_SECONDS.
  """
  if not faulthandler.is_enabled():  # which has a handler of its own
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
