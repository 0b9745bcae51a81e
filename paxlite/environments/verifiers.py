"""Tasksets of verifiers: ENVIRONMENT=paxlite.environments.verifiers.Verifiers.

The model is the agent: its answers, and the results of the tools that it calls, make the trace that
a task scores. Tools run in the process of the environment. A trace is made again for each call from
the messages, so that an episode can be repeated: calls of earlier answers are made again too.
"""

import asyncio
import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxlite.cli.user_modules import import_named
from paxlite.core.json_text import parsed
from paxlite.environments.sources import write_records
from paxlite.finetuning.reinforcement.tools import calls, message, schema

Messages = Sequence[Mapping[str, Any]]


class Verifiers:
  """Runs the tools of tasks of verifiers, and scores episodes."""

  def __init__(self) -> None:
    import verifiers.v1  # noqa: F401  (when the environment is looked up, which may take longer)

  def reply(self, record: Mapping[str, Any], messages: Messages) -> list[dict[str, Any]] | None:
    """Returns the results of the calls in the last answer; None: the episode has ended."""
    return asyncio.run(_replied(record, messages))

  def reward(self, record: Mapping[str, Any], messages: Messages) -> float:
    """Returns the sum of the task's weighted rewards."""
    return asyncio.run(_rewarded(record, messages))


def write(taskset: str, options: Mapping[str, Any], path: str) -> None:
  """Writes the prompts of a taskset.

  Args:
    taskset: Its id.
    options: Those of its configuration; and `limit`, the number of tasks.
    path: The file.
  """
  records = []
  for number, task in enumerate(_tasks(taskset, json.dumps(options, sort_keys=True))):
    _check(task)
    data = task.data
    asked = data.prompt if isinstance(data.prompt, str) else [m.model_dump() for m in data.prompt]
    messages = [{'role': 'user', 'content': asked}] if isinstance(asked, str) else asked
    if data.system_prompt is not None:
      messages = [{'role': 'system', 'content': data.system_prompt}, *messages]
    tools = [schema(function, name) for name, function in _tools(_servers(task)).items()]
    given = {'taskset': taskset, 'options': options, 'number': number, 'hash': task.hash}
    of_tools = {'tools': tools} if tools else {}
    records.append({'messages': messages, **of_tools, 'verifiers': given})
  write_records(path, records)


@functools.lru_cache(16)
def _tasks(taskset: str, options: str) -> list[Any]:
  from verifiers.v1.envs.single_agent import SingleAgentEnv
  from verifiers.v1.utils import loaders

  with contextlib.suppress(ImportError):  # which the loader tells better
    import_named(taskset.rpartition('/')[2].partition('@')[0].replace('-', '_').lower())
  given = parsed(options)
  limit = given.pop('limit', None)
  if loaders.environment_class(taskset) is not SingleAgentEnv:
    raise ValueError(f'{taskset} has an Env of its own, which is not supported')
  found = loaders.load_taskset(
    loaders.taskset_config_type(taskset).model_validate({**given, 'id': taskset})
  )
  if not found.bounded and limit is None:
    raise ValueError(f'{taskset} has no end: limit=N takes the first N tasks')
  tasks = [*(found if limit is None else found.take(limit))]
  for task in tasks:
    task.shared_servers = found.toolsets(found.config)
  return tasks


def _check(task: Any) -> None:
  """Raises ValueError if a task needs what paxlite has not."""
  data = task.data
  needing = [fn.__name__ for fn in task.hooks('reward') if _needs_runtime(fn)]
  if task.NEEDS_CONTAINER or data.image is not None or needing:
    raise ValueError(f'the task {data.name or data.idx} needs a container, which is not supported')
  if data.prompt is None:
    raise ValueError(f'the task {data.name or data.idx} has no prompt, which is not supported')


def _needs_runtime(function: Callable[..., Any]) -> bool:
  parameter = inspect.signature(function).parameters.get('runtime')
  return parameter is not None and parameter.default is parameter.empty


def _servers(task: Any) -> list[Any]:
  return [*task.shared_servers, *task.toolsets(task.config)]


def _tools(servers: Sequence[Any]) -> dict[str, Callable[..., Any]]:
  """Returns the functions of toolsets by the names that models know."""
  from verifiers.v1.utils.decorators import discover_decorated

  found = {}
  for server in servers:
    for function in discover_decorated(server, 'tool'):
      name = getattr(function, 'tool_name', None) or function.__name__
      found[f'{server.server_name}_{name}' if server.server_name else name] = function
  return found


class _Play:
  """An episode up to its last message: its trace, and the tools with their state."""

  def __init__(self, record: Mapping[str, Any]):
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    given = record['verifiers']
    options = json.dumps(given['options'], sort_keys=True)
    self.task = _tasks(given['taskset'], options)[given['number']]
    if self.task.hash != given['hash']:
      raise ValueError(f'the taskset {given["taskset"]} has changed since its prompts were written')
    self.trace = vf.Trace(
      task=vf.TraceTask(
        type=type(self.task).__name__, data=self.task.data, key=self.task.key, hash=self.task.hash
      ),
      state=state_cls(type(self.task))(),
      agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    self._servers = _servers(self.task)
    self.tools = _tools(self._servers)

  async def go(self, messages: Messages, asked: int) -> None:
    """Says messages, of which the first ones are the prompt."""
    await self.task.setup(self.trace, None)
    for server in self._servers:
      if isinstance(self.trace.state, server._state_cls):
        server._inert_state = self.trace.state  # what its `state` is without a channel
      await server.setup()
      await server.setup_task(self.task)
    for number, said in enumerate(messages):
      is_own = said['role'] == 'assistant' and number >= asked
      self._add(said, is_own)
      if is_own and number + 1 < len(messages):
        await self.results()

  def _add(self, said: Mapping[str, Any], is_own: bool) -> None:
    import pydantic
    import verifiers.v1 as vf
    from verifiers.v1.types import Message

    given = dict(said)
    if is_own and (found := calls(said['content'], [*self.tools])):
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

  async def results(self) -> list[dict[str, Any]]:
    """Returns the results of the calls in the last message."""
    found = []
    for call in self.trace.last_message.tool_calls or []:
      try:
        result = self.tools[call.name](**parsed(call.arguments))
        result = await result if inspect.isawaitable(result) else result
      except Exception as e:
        result = f'error: {type(e).__name__}: {e}'
      found.append(message(int(call.id.removeprefix('call_')), call.name, result))
    return found

  async def is_stopped(self) -> bool:
    """Whether a condition of the task ends the episode."""
    results = [stop(self._boundaries()) for stop in self._stops()]
    return any([await one if inspect.isawaitable(one) else one for one in results])

  def _stops(self) -> list[Callable[[Mapping[Any, Any]], Any]]:
    from verifiers.v1.utils.decorators import invoke

    return [functools.partial(invoke, stop) for stop in self.task.hooks('stop')]

  def _boundaries(self) -> dict[Any, Any]:
    """Returns what conditions may ask for, by its class."""
    import verifiers.v1 as vf
    from verifiers.v1.types import Request, Response

    last = self.trace.last_message
    finish = self.trace.calls[-1].finish_reason
    answer = Response(id='', created=0, model='', message=last, finish_reason=finish)
    asked = Request(messages=self.trace.messages)
    return {vf.Trace: self.trace, Request: asked, Response: answer}


async def _played(record: Mapping[str, Any], messages: Messages) -> _Play:
  play = _Play(record)
  others = [i for i, said in enumerate(record['messages']) if said['role'] != 'assistant']
  await play.go(messages, others[-1] + 1)  # an answer at the end of a prompt is left out
  return play


async def _replied(record: Mapping[str, Any], messages: Messages) -> list[dict[str, Any]] | None:
  play = await _played(record, messages)
  return None if await play.is_stopped() else await play.results() or None


async def _rewarded(record: Mapping[str, Any], messages: Messages) -> float:
  play = await _played(record, messages)
  trace = play.trace
  trace.stop('agent_completed')
  trace.ok = True
  await play.task.finalize(trace, None)
  await play.task.score(trace, None)
  if missing := [name for name, reward in trace.rewards.items() if reward is None]:
    raise ValueError(f'the rewards {", ".join(missing)} were not computed')
  return float(trace.reward)
