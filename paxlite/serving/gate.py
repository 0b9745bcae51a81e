"""Checks the host names of every request, and logs it."""

import json
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from paxlite.cli.terminal import warn
from paxlite.core.errors import UserError
from paxlite.serving import errors
from paxlite.serving.errors import ApiError

# the types of ASGI
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = ('localhost', '127.0.0.1', '::1')
_USAGE = 'paxlite.usage'  # of a scope: the numbers of tokens of the prompts and the answers
_NOT_LOGGED = '/health'  # is asked every few seconds


def note_usage(scope: Message, prompt: int, new: int) -> None:
  """Records the token counts of a request for the log."""
  scope[_USAGE] = prompt, new


class RequestGate:
  """Logs a line per request, and answers requests for other hosts with status 403.

  A browser sends requests to any address that a page of a stranger names, also to a name of the
  stranger that leads to this machine (DNS rebinding). They have that name as their Host, or the
  stranger's site as their Origin.

  Args:
    app: What answers the requests.
    hosts: The names that the server may be called by; empty: any, and then an Origin must be the
      Host of its request.
  """

  def __init__(self, app: App, hosts: Collection[str] = ()):
    self._app, self._hosts = app, {host.lower().strip('[]') for host in hosts}

  async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    started, status = time.perf_counter(), 499  # the client went away

    async def noting(message: Message) -> None:
      nonlocal status
      if message['type'] == 'http.response.start':
        status = message['status']
      await send(message)

    try:
      if (error := self._refusal(scope)) is None:
        await self._app(scope, receive, noting)
      else:
        await _refuse(error, noting)
    finally:
      if scope['path'] != _NOT_LOGGED:
        warn(_line(scope, status, time.perf_counter() - started))

  def _refusal(self, scope: Message) -> ApiError | None:
    """Returns the error of a request that is not for this server; None: it is for it."""
    headers = [(key, value.decode('latin-1')) for key, value in scope['headers']]
    hosts = {value: _host(value, False) for key, value in headers if key == b'host'}
    for value, name in hosts.items():
      if self._hosts and name not in self._hosts:
        return errors.foreign_host('Host', value)
    for value in (value for key, value in headers if key == b'origin'):
      name = _host(value, True)
      if name is None or name not in (self._hosts or hosts.values()):
        return errors.foreign_host('Origin', value)
    return None


async def _refuse(error: ApiError, send: Send) -> None:
  body = json.dumps(error.body).encode()
  headers = [(b'content-type', b'application/json'), (b'content-length', b'%d' % len(body))]
  await send(dict(type='http.response.start', status=error.status, headers=headers))
  await send(dict(type='http.response.body', body=body))


def allowed_host(text: str) -> str:
  """Returns the name in a value of --allowed_hosts, which may have a port, or be an address.

  Raises UserError if there is none.
  """
  address = f'[{text}]' if text.count(':') > 1 and '[' not in text and '//' not in text else text
  name = _host(address, '//' in text)
  if not name:
    raise UserError(f'--allowed_hosts: {text!r} is not the name of a host, such as example.com')
  return name


def _host(value: str, is_origin: bool) -> str | None:
  """Returns the name in a header Host or Origin; None: there is none, as in `null`."""
  try:
    found = urllib.parse.urlsplit(value if is_origin else f'//{value}')
    _ = found.port
  except ValueError:
    return None
  return found.hostname


def _line(scope: Message, status: int, seconds: float) -> str:
  client = scope.get('client')
  tokens = '{}+{} tokens '.format(*scope[_USAGE]) if _USAGE in scope else ''
  return (
    f'{client[0] if client else "-"} {scope["method"]} {scope["path"][:200]!r} {status} '
    f'{tokens}{1000 * seconds:.0f} ms'
  )
