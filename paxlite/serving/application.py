"""The common parts of a server's APIs: the key, request bodies and error responses."""

import abc
import asyncio
import concurrent.futures
import hmac
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paxlite.core.json_text import JsonObject
from paxlite.serving import errors
from paxlite.serving.errors import ApiError
from paxlite.serving.fields import body_of
from paxlite.serving.gate import RequestGate

S = TypeVar('S')
T = TypeVar('T')

_MOST_BYTES = 8 << 20  # of a request's body
_BODY_SECONDS = 30.0  # to send it
_READERS = 2  # threads that read bodies; more of them would let the loop of events wait


class Served(NamedTuple):
  """An API that is ready to answer.

  Attributes:
    application: Its application.
    start: Starts what computes its answers.
    stop: Ends that.
    address: What its clients have behind the port in their base URL.
  """

  application: RequestGate
  start: Callable[[], None]
  stop: Callable[[], None]
  address: str


class Application(abc.ABC):
  """An API.

  Args:
    key: What clients must send; '': nothing.
    hosts: See gate.RequestGate.

  Attributes:
    key_form: The header of the key, and its value with KEY in the place of the key.
  """

  key_form = ('Authorization', 'Bearer KEY')

  def __init__(self, key: str = '', hosts: Collection[str] = ()):
    self._key, self._hosts = key, hosts
    self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, 'reader')

  @property
  @abc.abstractmethod
  def routes(self) -> list[Route]:
    """The paths and their handlers."""

  @property
  def application(self) -> RequestGate:
    """The ASGI application."""
    handlers: Any = {
      ApiError: self._on_error,
      HTTPException: self._on_http_error,
      ClientDisconnect: self._on_disconnect,
      Exception: self._on_failure,
    }
    return RequestGate(Starlette(routes=self.routes, exception_handlers=handlers), self._hosts)

  async def body(self, request: HttpRequest) -> JsonObject:
    """Returns the JSON object of a request; raises ApiError if there is none."""
    return await self.aside(body_of, await self.raw_body(request))

  async def raw_body(self, request: HttpRequest) -> bytes:
    """Returns the body of a request; raises ApiError if it is too large, or sent too slowly."""
    parts, size = [], 0
    try:
      async with asyncio.timeout(_BODY_SECONDS):
        async for part in request.stream():
          parts.append(part)
          size += len(part)
          if size > _MOST_BYTES:
            raise ApiError(
              f'The body is larger than {_MOST_BYTES >> 20} MiB', code='too_large', status=413
            )
    except TimeoutError:
      raise errors.too_slow_body(_BODY_SECONDS) from None
    return b''.join(parts)

  async def aside(self, read: Callable[[S], T], given: S) -> T:
    """Calls what may take a while, such as parsing or a chat template, in a thread of its own."""
    return await asyncio.get_running_loop().run_in_executor(self._readers, read, given)

  def check_key(self, request: HttpRequest) -> None:
    """Raises ApiError unless the client has sent the key."""
    if not self._key:
      return
    header, form = self.key_form
    given = request.headers.get(header, '').encode('latin-1')  # the bytes as they came
    if not hmac.compare_digest(given, form.replace('KEY', self._key).encode()):
      raise errors.wrong_key(f'{header}: {form}')

  async def _on_error(self, request: HttpRequest, error: ApiError) -> Response:
    # what is left of a body that was given up is not read
    close = {'connection': 'close'} if error.status in (408, 413) else None
    return JSONResponse(error.body, error.status, close)

  async def _on_http_error(self, request: HttpRequest, error: HTTPException) -> Response:
    message = f'{request.method} {request.url.path}: {error.detail}'
    return JSONResponse(ApiError(message, status=error.status_code).body, error.status_code)

  async def _on_disconnect(self, request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it

  async def _on_failure(self, request: HttpRequest, error: Exception) -> Response:
    failed = errors.failed()
    return JSONResponse(failed.body, failed.status)
