"""Notices at once that another process of a run is gone.

JAX's heartbeats need half a minute for it and end the process with SIGABRT, and a collective whose
peer is gone may wait for ever. Here every process keeps a TCP connection to process 0, which the
kernel closes when a process ends, however it ends. Process 0 leaves when it loses one of them, and
tells the others which; they leave when they lose process 0.
"""

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from types import TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.distributed import listens_on
from paxlite.errors import EXIT_AGAIN
from paxlite.terminal import settle, warn

_TOKEN_BYTES = 16
_CONNECT_SECONDS = 60
_GRACE_SECONDS = 2  # an error that all processes have is told by each, with its own exit code
_KEEPALIVE_SECONDS = 10  # a host that loses power closes nothing
_GOODBYE, _LOST = b'.', b'!'  # the latter before the number of a process

log = logging.getLogger('paxlite')


class Peers:
  """A context in which the process leaves with EXIT_AGAIN when another one is gone.

  Args:
    host: The address of process 0, where it listens on a port of its own for those that know a
      random token; None where the run has one process.
  """

  def __init__(self, host: str | None):
    self._host = host
    self._connections: dict[socket.socket, int] = {}
    self._leaving = False

  def __enter__(self) -> 'Peers':
    if self._host is None or jax.process_count() == 1:
      return self
    try:
      listener = self._listener() if jax.process_index() == 0 else None
      port = listener.getsockname()[1] if listener is not None else 0
    except OSError as e:
      log.warning('%s: lost peers will not be noticed at once: %s', self._host, e)
      listener, port = None, 0
    mine = np.array([port, *secrets.token_bytes(_TOKEN_BYTES)], np.int32)
    port, *token = np.asarray(multihost_utils.broadcast_one_to_all(mine)).tolist()
    try:
      if listener is not None:
        with listener:
          self._accept(listener, bytes(token))
      elif port:
        self._connect(port, bytes(token))
    except OSError as e:
      log.warning('process %d will not notice lost peers at once: %s', jax.process_index(), e)
    threading.Thread(target=self._watch, name='peers', daemon=True).start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._leaving = True
    for connection in self._connections:
      with contextlib.suppress(OSError):  # it has left before
        connection.sendall(_GOODBYE)

  def _listener(self) -> socket.socket:
    assert self._host is not None
    family = socket.AF_INET6 if ':' in self._host else socket.AF_INET
    return socket.create_server((listens_on(self._host), 0), family=family)

  def _accept(self, listener: socket.socket, token: bytes) -> None:
    end = time.monotonic() + _CONNECT_SECONDS
    while len(self._connections) < jax.process_count() - 1:
      listener.settimeout(max(0.0, end - time.monotonic()))
      connection, _ = listener.accept()
      connection.settimeout(5)
      try:
        greeting = _received(connection, _TOKEN_BYTES + 4)
      except OSError:
        greeting = b''
      if not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
        connection.close()  # a stranger
        continue
      self._keep(connection, int.from_bytes(greeting[_TOKEN_BYTES:], 'big'))

  def _connect(self, port: int, token: bytes) -> None:
    connection = socket.create_connection((self._host, port), _CONNECT_SECONDS)
    connection.sendall(token + jax.process_index().to_bytes(4, 'big'))
    self._keep(connection, 0)

  def _keep(self, connection: socket.socket, process: int) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ('TCP_KEEPIDLE', 'TCP_KEEPINTVL'):
      if hasattr(socket, option):  # Linux's
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_SECONDS)
    self._connections[connection] = process

  def _watch(self) -> None:
    with selectors.DefaultSelector() as selector:
      for connection in self._connections:
        selector.register(connection, selectors.EVENT_READ, connection)
      while selector.get_map():
        for key, _ in selector.select():
          try:
            said = key.data.recv(1)
          except OSError:
            said = b''
          if said != _GOODBYE and not self._leaving:
            lost = self._connections[key.data]
            if said == _LOST:
              with contextlib.suppress(OSError):
                lost = int.from_bytes(_received(key.data, 4), 'big')
            self._leave(lost)
          selector.unregister(key.data)

  def _leave(self, lost: int) -> None:
    if jax.process_index() == 0:
      for connection in self._connections:
        with contextlib.suppress(OSError):
          connection.sendall(_LOST + lost.to_bytes(4, 'big'))
    time.sleep(_GRACE_SECONDS)
    if self._leaving:
      return
    process = f'process {jax.process_index()} of {jax.process_count()}'
    warn(f'stopped: {process}: process {lost} is gone')
    settle()
    os._exit(EXIT_AGAIN)


def _received(connection: socket.socket, count: int) -> bytes:
  data = b''
  while len(data) < count and (more := connection.recv(count - len(data))):
    data += more
  return data
