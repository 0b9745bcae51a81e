"""The paths of OpenAI's API, as an application of Starlette."""

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer import Tokenizer
from paxlite.generation.grammar import GrammarError
from paxlite.generation.request import Completion
from paxlite.serving import errors, page
from paxlite.serving.bodies import Bodies, CompletionRequest
from paxlite.serving.errors import ApiError
from paxlite.serving.fields import body_of
from paxlite.serving.gate import RequestGate, note_usage
from paxlite.serving.replies import ChatReply, Reply
from paxlite.serving.worker import BusyError, Ticket, Worker

log = logging.getLogger('paxlite')
S = TypeVar('S')
T = TypeVar('T')

_MOST_BYTES = 8 << 20  # of a request's body
_BODY_SECONDS = 30.0  # to send it
_READERS = 2  # threads that read bodies; more of them would let the loop of events wait
_LOOK_EVERY = 1.0  # seconds between two looks whether a client is still there


class Api:
  """Answers requests with a worker.

  Args:
    worker: Runs the engine.
    bodies: Reads requests.
    seconds: The most seconds from a request to the end of its answer.
    key: What clients must send; '': nothing.
    hosts: See gate.RequestGate.
    has_page: Whether there is a page for people at /.
  """

  def __init__(
    self,
    worker: Worker,
    bodies: Bodies,
    tokenizer: Tokenizer,
    model: str,
    seconds: float,
    key: str = '',
    hosts: Collection[str] = (),
    has_page: bool = True,
  ):
    self._worker, self._bodies, self._tokenizer = worker, bodies, tokenizer
    self._model, self._seconds, self._key = model, seconds, key
    self._hosts, self._has_page = hosts, has_page
    self._started = int(time.time())
    self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, 'reader')

  @property
  def application(self) -> RequestGate:
    """The application."""
    routes = [
      Route('/health', self._health),
      Route('/v1/models', self._models),
      Route('/v1/models/{name:path}', self._one_model),
      Route('/v1/completions', self._completions, methods=['POST']),
      Route('/v1/chat/completions', self._chat, methods=['POST']),
    ]
    if self._has_page:
      routes.append(Route('/', self._page))
    handlers: Any = {
      ApiError: self._on_error, HTTPException: self._on_http_error,
      ClientDisconnect: self._on_disconnect, Exception: self._on_failure,
    }  # fmt: skip
    return RequestGate(Starlette(routes=routes, exception_handlers=handlers), self._hosts)

  async def _page(self, request: HttpRequest) -> Response:
    return Response(page.CONTENT, headers=page.HEADERS)

  async def _health(self, request: HttpRequest) -> Response:
    return JSONResponse(
      dict(status='ok', active=self._worker.engine.num_active, unanswered=self._worker.count)
    )

  async def _models(self, request: HttpRequest) -> Response:
    self._check_key(request)
    return JSONResponse(dict(object='list', data=[self._described]))

  async def _one_model(self, request: HttpRequest) -> Response:
    self._check_key(request)
    self._check_model(request.path_params['name'])
    return JSONResponse(self._described)

  @property
  def _described(self) -> JsonObject:
    return dict(
      id=self._model, object='model', created=self._started, owned_by='paxlite',
      max_model_len=self._worker.engine.max_length,
    )  # fmt: skip

  async def _completions(self, request: HttpRequest) -> Response:
    return await self._answered(request, self._bodies.completion, Reply)

  async def _chat(self, request: HttpRequest) -> Response:
    return await self._answered(request, self._bodies.chat, ChatReply)

  async def _answered(
    self, request: HttpRequest, read: Callable[[JsonObject], CompletionRequest], kind: type[Reply]
  ) -> Response:
    self._check_key(request)
    body = await self._body(request)
    self._check_model(body.get('model'))
    asked = await self._aside(read, body)
    try:
      for one in asked.requests:
        self._worker.engine.check(one)
      tickets = self._worker.submit(asked.requests)
    except UserError as e:
      raise ApiError(str(e)) from None
    except BusyError:
      raise errors.busy() from None
    reply = kind(asked, self._tokenizer, self._model)
    if asked.stream:
      events = self._events(request, reply, tickets)
      return StreamingResponse(events, media_type='text/event-stream')
    answers = await self._answers(request, tickets)
    _note(request, reply, answers)
    return JSONResponse(reply.whole(answers))

  async def _answers(self, request: HttpRequest, tickets: Sequence[Ticket]) -> list[Completion]:
    """Waits for the answers; they are given up when the client goes away, or the time is over."""
    waiting = asyncio.ensure_future(_collected(tickets))
    watching = asyncio.ensure_future(_gone(request))
    try:
      async with asyncio.timeout(self._seconds):
        await asyncio.wait([waiting, watching], return_when=asyncio.FIRST_COMPLETED)
      if not waiting.done():
        raise ClientDisconnect
      return waiting.result()
    except GrammarError as e:
      raise ApiError(str(e), 'response_format') from None
    except TimeoutError:
      raise errors.too_slow(self._seconds) from None
    finally:
      waiting.cancel()
      watching.cancel()
      self._give_up(tickets)

  async def _events(
    self, request: HttpRequest, reply: Reply, tickets: Sequence[Ticket]
  ) -> AsyncIterator[str]:
    """Yields the chunks of a stream, as server-sent events."""
    answers: dict[int, Completion] = {}
    try:
      async with asyncio.timeout(self._seconds):
        for index in range(len(tickets)):
          if (opening := reply.opening(index)) is not None:
            yield _event(opening)
        async for index, progress in _merged(tickets):
          if progress.answer is not None:
            answers[index] = progress.answer
          chunk = reply.piece(index, progress.parts, progress.answer)
          if chunk is not None:
            yield _event(chunk)
      _note(request, reply, [*answers.values()])
      if reply.asked.usage:
        yield _event(reply.last([answers[i] for i in range(len(tickets))]))
      yield 'data: [DONE]\n\n'
    except TimeoutError:
      yield _event(errors.too_slow(self._seconds).body)
    except GrammarError as e:
      yield _event(ApiError(str(e), 'response_format').body)
    except Exception:
      log.exception('a stream has failed')
      yield _event(errors.failed().body)
    finally:
      self._give_up(tickets)

  def _give_up(self, tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
      self._worker.cancel(ticket)

  async def _body(self, request: HttpRequest) -> JsonObject:
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
    return await self._aside(body_of, b''.join(parts))

  async def _aside(self, read: Callable[[S], T], given: S) -> T:
    """Calls what may take a while, such as parsing or a chat template, in a thread of its own."""
    return await asyncio.get_running_loop().run_in_executor(self._readers, read, given)

  def _check_key(self, request: HttpRequest) -> None:
    if not self._key:
      return
    given = request.headers.get('authorization', '').encode('latin-1')  # the bytes as they came
    if not hmac.compare_digest(given, f'Bearer {self._key}'.encode()):
      raise errors.wrong_key()

  def _check_model(self, name: object) -> None:
    if name is None:
      raise ApiError('you must provide a model parameter', 'model')
    if name != self._model:
      raise errors.unknown_model(str(name), self._model)

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


def _note(request: HttpRequest, reply: Reply, answers: Sequence[Completion]) -> None:
  """Notes the numbers of tokens for the log."""
  usage = reply.usage(answers)
  note_usage(request.scope, usage['prompt_tokens'], usage['completion_tokens'])


async def _collected(tickets: Sequence[Ticket]) -> list[Completion]:
  found = []
  for ticket in tickets:
    async for progress in ticket.news():
      if progress.answer is not None:
        found.append(progress.answer)
  return found


async def _gone(request: HttpRequest) -> None:
  """Returns when the client has closed its connection."""
  while not await request.is_disconnected():
    await asyncio.sleep(_LOOK_EVERY)


async def _merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Any]]:
  """Yields the progress of several answers as it comes."""
  news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

  async def follow(index: int, ticket: Ticket) -> None:
    try:
      async for progress in ticket.news():
        await news.put((index, progress))
      await news.put((index, None))
    except Exception as e:
      await news.put((index, e))

  tasks = [asyncio.ensure_future(follow(i, ticket)) for i, ticket in enumerate(tickets)]
  try:
    left = len(tasks)
    while left:
      index, progress = await news.get()
      if isinstance(progress, Exception):
        raise progress
      if progress is None:
        left -= 1
      else:
        yield index, progress
  finally:
    for task in tasks:
      task.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await task


def _event(chunk: JsonObject) -> str:
  return f'data: {json.dumps(chunk, ensure_ascii=False)}\n\n'
