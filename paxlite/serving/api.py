"""The paths of OpenAI's API, as a Starlette application."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

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
from paxlite.serving.application import Application
from paxlite.serving.bodies import Bodies, CompletionRequest
from paxlite.serving.errors import ApiError
from paxlite.serving.gate import note_usage
from paxlite.serving.replies import ChatReply, Reply
from paxlite.serving.worker import BusyError, Ticket, Worker

log = logging.getLogger('paxlite')

_LOOK_EVERY = 1.0  # seconds between two looks whether a client is still there


class Api(Application):
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
    super().__init__(key, hosts)
    self._worker, self._bodies, self._tokenizer = worker, bodies, tokenizer
    self._model, self._seconds, self._has_page = model, seconds, has_page
    self._started = int(time.time())

  @property
  def routes(self) -> list[Route]:
    routes = [
      Route('/health', self._health),
      Route('/v1/models', self._models),
      Route('/v1/models/{name:path}', self._one_model),
      Route('/v1/completions', self._completions, methods=['POST']),
      Route('/v1/chat/completions', self._chat, methods=['POST']),
    ]
    if self._has_page:
      routes.append(Route('/', self._page))
    return routes

  async def _page(self, request: HttpRequest) -> Response:
    return Response(page.CONTENT, headers=page.HEADERS)

  async def _health(self, request: HttpRequest) -> Response:
    return JSONResponse(
      dict(status='ok', active=self._worker.engine.num_active, unanswered=self._worker.count)
    )

  async def _models(self, request: HttpRequest) -> Response:
    self.check_key(request)
    return JSONResponse(dict(object='list', data=[self._described]))

  async def _one_model(self, request: HttpRequest) -> Response:
    self.check_key(request)
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
    self.check_key(request)
    body = await self.body(request)
    self._check_model(body.get('model'))
    asked = await self.aside(read, body)
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

  def _check_model(self, name: object) -> None:
    if name is None:
      raise ApiError('you must provide a model parameter', 'model')
    if name != self._model:
      raise errors.unknown_model(str(name), self._model)


def _note(request: HttpRequest, reply: Reply, answers: Sequence[Completion]) -> None:
  """Records the token counts for the log."""
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
