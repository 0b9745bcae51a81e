"""What every request passes: the check of the names that it is sent to, and the log."""

import time
import urllib.parse
from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paxlite.cli.terminal import warn
from paxlite.serving import errors

LOOPBACK = ('localhost', '127.0.0.1', '::1')
_USAGE = 'paxlite.usage'  # of a scope: the numbers of tokens of the prompts and the answers
_NOT_LOGGED = '/health'  # is asked every few seconds


def note_usage(scope: MutableMapping[str, Any], prompt: int, new: int) -> None:
  """Notes the numbers of tokens of a request, for the log."""
  scope[_USAGE] = prompt, new


class Gate:
  """Logs one line for each request, and answers those for other hosts with status 403.

  A browser sends requests to any address that a page of a stranger names, also to a name of the
  stranger that leads to this machine (DNS rebinding). They have that name as their Host, or the
  stranger's site as their Origin.

  Args:
    app: What answers the requests.
    hosts: The names that the server may be called by; empty: any.
  """

  def __init__(self, app: ASGIApp, hosts: Collection[str] = ()):
    self._app, self._hosts = app, {host.lower().strip('[]') for host in hosts}

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    started, status = time.perf_counter(), 499  # the client went away

    async def noting(message: MutableMapping[str, Any]) -> None:
      nonlocal status
      if message['type'] == 'http.response.start':
        status = message['status']
      await send(message)

    try:
      app = self._app if (refused := self._refused(scope)) is None else refused
      await app(scope, receive, noting)
    finally:
      if scope['path'] != _NOT_LOGGED:
        warn(_line(scope, status, time.perf_counter() - started))

  def _refused(self, scope: Scope) -> JSONResponse | None:
    """Returns the response to a request that is not for this server."""
    if not self._hosts:
      return None
    for name, kind in ((b'host', 'Host'), (b'origin', 'Origin')):
      for value in (value for key, value in scope['headers'] if key == name):
        if _host(value.decode('latin-1'), kind == 'Origin') not in self._hosts:
          error = errors.foreign_host(kind, value.decode('latin-1'))
          return JSONResponse(error.body, error.status)
    return None


def _host(value: str, is_origin: bool) -> str | None:
  """Returns the name in a header Host or Origin; None: there is none, as in `null`."""
  try:
    found = urllib.parse.urlsplit(value if is_origin else f'//{value}')
    _ = found.port
  except ValueError:
    return None
  return found.hostname


def _line(scope: Scope, status: int, seconds: float) -> str:
  client = scope.get('client')
  tokens = '{}+{} tokens '.format(*scope[_USAGE]) if _USAGE in scope else ''
  return (
    f'{client[0] if client else "-"} {scope["method"]} {scope["path"][:200]!r} {status} '
    f'{tokens}{1000 * seconds:.0f} ms'
  )
