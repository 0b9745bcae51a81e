"""The agent of an Env of verifiers, whose answers are those of an episode.

An Env's `run` plays its agent, and may be its user: a script, a game. Here the agent answers what
an episode has so far. Where the Env, or a tool, goes on to say something to it, this is what
follows in the episode, and the play ends.
"""

import contextlib
import functools
import inspect
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn

from paxlite.core.json_text import parsed
from paxlite.finetuning.reinforcement.tools import calls, message

Messages = Sequence[Mapping[str, Any]]


class _Ended(BaseException):
  """Ends a play; no exception that an Env's `except Exception` would take for an error."""


class Player:
  """An agent, and its interaction: both the agent that an Env runs and what it talks to.

  Args:
    servers: Makes the toolsets of a task.
    said: The conversation so far.
    asked: How many of its first messages are the prompt.
    scores: Whether the episode has ended, so that what the Env says gets no answer, and the task
      scores its trace.

  Attributes:
    trace: The trace of the task.
    traces: The same, once it has ended.
    asked: What the Env, or a tool, says after all that was said; None: nothing.
  """

  def __init__(
    self,
    servers: Callable[[Any], Sequence[Any]],
    said: Messages = (),
    asked: int = 0,
    scores: bool = False,
  ):
    self._servers_of, self._said, self._prompt, self._scores = servers, said, asked, scores
    self._at = -1  # the next message; -1: before the prompt
    self._is_over = False
    self._refusal = ''
    self.traces: list[Any] = []
    self.asked: list[dict[str, Any]] | None = None

  async def play(self, env: Any, task: Any) -> None:
    """Plays a task with its Env."""
    from verifiers.v1.agent import Agents

    agents = Agents(env.config, lambda *_: self)
    random.seed(task.hash)  # what an Env draws is the same each time
    try:
      await env.setup(agents)
      await env.run(task, agents)
    except BaseException:  # also the group of a TaskGroup
      if self.asked is None and not self._refusal:
        raise
    if self._refusal:
      raise ValueError(self._refusal)

  async def run(self, task: Any, **_: object) -> Any:
    """Plays a task whose prompt says all, as Agent.run does; returns its trace."""
    async with self.interaction(task):
      await self.turn()
      self.trace.stop('agent_completed')
    return self.trace

  @contextlib.asynccontextmanager
  async def interaction(self, task: Any, **_: object) -> AsyncIterator['Player']:
    """Opens the exchange of a task, and scores it at its end, as Agent.interaction does."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    if self._at >= 0:
      self._refusal = 'an Env that plays its agent more than once is not supported'
      raise _Ended
    _check(task)
    self._at, self._task = 0, task
    self.trace = vf.Trace(
      task=vf.TraceTask(
        type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
      ),
      state=state_cls(type(task))(),
      agent=vf.AgentInfo(config=vf.AgentConfig()),
    )  # fmt: skip
    await task.setup(self.trace, None)
    servers = self._servers_of(task)
    self._tools = tools_of(servers)
    for server in servers:
      if isinstance(self.trace.state, server._state_cls):
        server._inert_state = self.trace.state  # what its `state` is without a channel
      await server.setup()
      await server.setup_task(task)
    yield self
    self.trace.stop('user_closed')
    if self._scores:
      await task.finalize(self.trace, None)
      await task.score(self.trace, None)
    self.trace.is_completed = self.trace.ok = True
    self.traces.append(self.trace)

  async def turn(self, message: str | Sequence[Any] | None = None) -> Any:
    """Says messages to the agent; returns its answers up to the first without a call of a tool."""
    from verifiers.v1.agent import Segment

    is_first = self._at == 0
    if self._is_over:
      return Segment(messages=[], terminated=True)
    if is_first or message is not None:
      new = prompt_of(self._task.data, message) if is_first else _dicts(message)
      if self._at == len(self._said):
        if self._scores:
          self._is_over = True
          return Segment(messages=[], terminated=True)
        self._ask(new)
      self._go(self._prompt if is_first else len(new))
    first = len(self.trace.nodes)
    while self._at < len(self._said):
      self._go(1)
      is_last = self._at == len(self._said)
      if is_last and await self._is_stopped():
        self._is_over = True
        break
      found = [] if is_last and self._scores else await self._results()
      if not found:
        break
      if is_last:
        self._ask(found)
      self._go(len(found))
    self._is_over |= self._scores and self._at == len(self._said)
    return Segment(messages=[node.message for node in self.trace.nodes[first:]])

  def _ask(self, messages: list[dict[str, Any]]) -> NoReturn:
    self.asked = messages
    raise _Ended

  def _go(self, count: int) -> None:
    """Adds the next messages to the trace."""
    for said in self._said[self._at : self._at + count]:
      self._add(said, said['role'] == 'assistant' and self._at >= self._prompt)
      self._at += 1

  def _add(self, said: Mapping[str, Any], is_own: bool) -> None:
    import pydantic
    import verifiers.v1 as vf
    from verifiers.v1.types import Message

    given = dict(said)
    if is_own and (found := calls(said['content'], [*self._tools])):
      number = len(self.trace.tool_messages)
      given['tool_calls'] = [
        {'id': f'call_{number + i}', 'name': name, 'arguments': json.dumps(arguments)}
        for i, (name, arguments) in enumerate(found)
      ]
    nodes = self.trace.nodes
    whole = pydantic.TypeAdapter(Message).validate_python(given)
    parent = len(nodes) - 1 if nodes else None
    nodes.append(vf.MessageNode(parent=parent, message=whole, sampled=is_own))
    if is_own:
      finish = 'tool_calls' if 'tool_calls' in given else 'stop'
      self.trace.calls.append(vf.ModelCall(node=len(nodes) - 1, finish_reason=finish))

  async def _results(self) -> list[dict[str, Any]]:
    """Returns the results of the calls in the last message."""
    found = []
    for call in self.trace.last_message.tool_calls or []:
      try:
        result = self._tools[call.name](**parsed(call.arguments))
        result = await result if inspect.isawaitable(result) else result
      except Exception as e:
        result = f'error: {type(e).__name__}: {e}'
      found.append(message(int(call.id.removeprefix('call_')), call.name, result))
    return found

  async def _is_stopped(self) -> bool:
    """Whether a condition of the task ends the episode, which the trace then names."""
    from verifiers.v1.utils.decorators import invoke

    results = [
      (stop.__name__, functools.partial(invoke, stop)(self._boundaries()))
      for stop in self._task.hooks('stop')
    ]
    for name, result in results:
      if await result if inspect.isawaitable(result) else result:
        self.trace.stop(name)
        return True
    return False

  def _boundaries(self) -> dict[Any, Any]:
    """Returns what conditions may ask for, by its class."""
    import verifiers.v1 as vf
    from verifiers.v1.types import Request, Response

    last = self.trace.last_message
    finish = self.trace.calls[-1].finish_reason
    answer = Response(id='', created=0, model='', message=last, finish_reason=finish)
    asked = Request(messages=self.trace.messages)
    return {vf.Trace: self.trace, Request: asked, Response: answer}


def tools_of(servers: Sequence[Any]) -> dict[str, Callable[..., Any]]:
  """Returns the functions of toolsets by the names that models know."""
  from verifiers.v1.utils.decorators import discover_decorated

  found = {}
  for server in servers:
    for function in discover_decorated(server, 'tool'):
      name = getattr(function, 'tool_name', None) or function.__name__
      found[f'{server.server_name}_{name}' if server.server_name else name] = function
  return found


def prompt_of(data: Any, opening: str | Sequence[Any] | None) -> list[dict[str, Any]]:
  """Returns the messages of a task's prompt, or of what its user says first."""
  asked = data.prompt if data.prompt is not None else opening
  if asked is None:
    raise ValueError(f'the task {data.name or data.idx} has no prompt, which is not supported')
  system = [] if data.system_prompt is None else [_of('system', data.system_prompt)]
  return [*system, *_dicts(asked)]


def _dicts(said: str | Sequence[Any] | None) -> list[dict[str, Any]]:
  """Returns what an Env says, a text or messages, as messages with a role and a content."""
  if said is None or isinstance(said, str):
    return [_of('user', said or '')]
  messages: Sequence[Any] = said
  return [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in messages]


def _of(role: str, content: str) -> dict[str, Any]:
  return {'role': role, 'content': content}


def _check(task: Any) -> None:
  """Raises ValueError if a task needs what paxlite has not."""
  data = task.data
  needing = [fn.__name__ for fn in task.hooks('reward') if _needs_runtime(fn)]
  if task.NEEDS_CONTAINER or data.image is not None or needing:
    raise ValueError(f'the task {data.name or data.idx} needs a container, which is not supported')


def _needs_runtime(function: Callable[..., Any]) -> bool:
  parameter = inspect.signature(function).parameters.get('runtime')
  return parameter is not None and parameter.default is parameter.empty
