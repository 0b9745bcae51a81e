"""The connections of a server: their number, and the time limits of a request."""

import asyncio
import resource
import time
from typing import Any

_MOST = 512  # connections
_HEAD_SECONDS = 10.0  # from a connection, or the end of an answer, to the end of the next head
_UNREAD_SECONDS = 30.0  # until a client has read enough for the server to write again
_MOST_PIPELINED = 16  # requests behind one that waits for its answer


def protocol(
  most: int = _MOST, seconds: float = _HEAD_SECONDS, unread_seconds: float = _UNREAD_SECONDS
) -> type[asyncio.Protocol]:
  """Returns a uvicorn protocol that limits slow clients.

  A connection is closed with status 408 if it does not send the head of a request in time. Above
  `most` connections, the oldest one that has not sent a whole request is closed, or, if all of them
  wait for an answer, the new one, with status 503. A connection is aborted if its client does not
  read, or sends many more requests before it has an answer.

  Args:
    most: The most connections; at most half of the files that the process may open.
    seconds: How long the head of a request may take.
    unread_seconds: How long a client may keep the server from writing.
  """
  from uvicorn.protocols.http.auto import AutoHTTPProtocol

  files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = min(most, files // 2) if files != resource.RLIM_INFINITY else most
  base: Any = AutoHTTPProtocol  # of httptools, or of h11

  class Connection(base):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:
      super().connection_made(transport)
      self.since = time.monotonic()
      self._timer: asyncio.TimerHandle | None = None
      self._reading: asyncio.TimerHandle | None = None
      if len(self.connections) > most:
        others = (c for c in self.connections if c is not self and not c.has_request)
        oldest = min(others, key=lambda c: c.since, default=None)
        if oldest is None:
          self._refuse('503 Service Unavailable')
          return
        self.connections.discard(oldest)
        oldest.transport.abort()
      self._wait()

    @property
    def has_request(self) -> bool:
      """Whether a complete request waits for its answer."""
      cycle = self.cycle
      return cycle is not None and not cycle.response_complete and not cycle.more_body

    def data_received(self, data: bytes) -> None:
      if self.transport.is_closing():
        return
      super().data_received(data)
      if len(getattr(self, 'pipeline', ())) > _MOST_PIPELINED:  # h11 reads one at a time
        self.transport.abort()
      if self.cycle is None or self.cycle.response_complete:
        self._wait()
      else:  # the body has a time limit of its own
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
      self._stop_waiting()
      self._stop_reading()
      super().connection_lost(exc)

    def pause_writing(self) -> None:
      super().pause_writing()
      self._reading = self.loop.call_later(unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
      self._stop_reading()
      super().resume_writing()

    def _stop_reading(self) -> None:
      if self._reading is not None:
        self._reading.cancel()
        self._reading = None

    def _wait(self) -> None:
      if self._timer is None:
        self._timer = self.loop.call_later(seconds, self._refuse, '408 Request Timeout')

    def _stop_waiting(self) -> None:
      if self._timer is not None:
        self._timer.cancel()
        self._timer = None

    def _refuse(self, status: str) -> None:
      if not self.transport.is_closing():
        self.transport.write(
          f'HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'.encode()
        )
        self.transport.close()

  return Connection
