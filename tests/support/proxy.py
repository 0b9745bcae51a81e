"""A proxy on loopback that makes a server slow, faulty or silent."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

_BLOCK = 1 << 16
_MOST_CONNECTIONS = 128
_CONFLICT = (
  b'HTTP/1.1 409 Conflict\r\nContent-Type: application/xml\r\nContent-Length: 54\r\n'
  b'Connection: close\r\n\r\n<Error><Code>ConditionalRequestConflict</Code></Error>'
)
_UNAVAILABLE = (
  b'HTTP/1.1 %d Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 47\r\n'
  b'Connection: close\r\n\r\n<Error><Code>SlowDown</Code><Message/></Error>\n'
)
_PAGE = (
  b'HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 40\r\nETag: "1"\r\n'
  b'Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nx-goog-generation: 1\r\n'
  b'Connection: close\r\n\r\n'
)
_HTML = b'<html><body>Please sign in</body></html>'
_REFUSED = (
  b'HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: 42\r\n'
  b'Connection: close\r\n\r\n<Error><Code>AccessDenied</Code></Error>   '
)


class Proxy:
  """Forwards connections to a server.

  Attributes:
    delay: Seconds by which each request is held back.
    mode: 'forward'; '503' and '429' answer every request with that status; 'reset' closes
      connections; 'silent' answers nothing, and begins to forward when the mode changes; 'third'
      answers every third request with 503; 'conflict' answers writes with 409, as S3 does if two of
      them race, and '412' and '403' with these; 'list-page' answers lists with a page of HTML, and
      'page' all that is read.
    endpoint: The address of the proxy.
    requests: The number of requests so far.
  """

  def __init__(self, server: str, delay: float = 0.0, mode: str = 'forward'):
    host, _, port = server.removeprefix('http://').partition(':')
    self._server = host, int(port)
    self.delay = delay
    self.mode = mode
    self.requests = 0
    self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
    self._listener = socket.create_server(('127.0.0.1', 0), backlog=_MOST_CONNECTIONS)
    self.endpoint = f'http://127.0.0.1:{self._listener.getsockname()[1]}'
    self._closed = False

  def serve(self) -> None:
    while not self._closed:
      try:
        client, _ = self._listener.accept()
      except OSError:
        return
      self._slots.acquire()
      threading.Thread(target=self._connection, args=(client,), daemon=True).start()

  def close(self) -> None:
    self._closed = True
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()

  def _connection(self, client: socket.socket) -> None:
    try:
      with client, socket.create_connection(self._server) as server:
        for each in (client, server):
          each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._answers, args=(server, client), daemon=True)
        back.start()
        self._requests(client, server)
        back.join()
    except OSError:
      pass
    finally:
      self._slots.release()

  def _requests(self, client: socket.socket, server: socket.socket) -> None:
    """Forwards requests; what comes after an idle moment is taken for a new one."""
    while data := client.recv(_BLOCK):
      if data.split(b' ', 1)[0] in (b'GET', b'PUT', b'POST', b'HEAD', b'DELETE'):
        self.requests += 1
        time.sleep(self.delay)
        while self.mode == 'silent' and not self._closed:
          time.sleep(0.05)
        if self.mode == 'reset':
          break
        status = '503' if self.mode == 'third' and self.requests % 3 == 0 else self.mode
        if status in ('429', '503'):
          client.sendall(_UNAVAILABLE % int(status))
          break
        line = data.partition(b'\r\n')[0]
        reads = line.startswith((b'GET', b'HEAD'))
        if reads and (status == 'page' or (status == 'list-page' and b'list-type=' in line)):
          client.sendall(_PAGE + (b'' if line.startswith(b'HEAD') else _HTML))
          break
        if status in ('412', '403') and data.startswith(b'PUT'):
          client.sendall(
            _REFUSED % {'412': b'412 Precondition Failed', '403': b'403 Forbidden'}[status]
          )
          break
        if self.mode == 'conflict' and data.startswith(b'PUT'):
          client.sendall(_CONFLICT)
          break
      server.sendall(data)
    for each in (client, server):
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)

  def _answers(self, server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while data := server.recv(_BLOCK):
        client.sendall(data)
      client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(server: str, delay: float = 0.0, mode: str = 'forward') -> Iterator[Proxy]:
  """Starts a proxy before a server for as long as the context lasts."""
  started = Proxy(server, delay, mode)
  thread = threading.Thread(target=started.serve, daemon=True)
  thread.start()
  try:
    yield started
  finally:
    started.close()
    thread.join()
