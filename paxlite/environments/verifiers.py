"""Tasksets of verifiers: ENVIRONMENT=paxlite.environments.verifiers.Verifiers.

The model is the agent: its answers, what the taskset's Env says to them as a user, and the results
of the tools that it calls, make the trace that a task scores. Env and tools run in the process of
the environment. They are played again for each call from the messages, so that an episode can be
repeated: calls of earlier answers are made again too.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.cli.user_modules import import_named
from paxlite.core.json_text import parsed
from paxlite.environments.sources import write_records
from paxlite.environments.verifiers_player import Player, tools_of
from paxlite.finetuning.reinforcement.tools import schema

Messages = Sequence[Mapping[str, Any]]


class Verifiers:
  """Plays tasks of verifiers with their users and tools, and scores episodes."""

  def __init__(self) -> None:
    import verifiers.v1  # noqa: F401  (when the environment is looked up, which may take longer)

  def reply(self, record: Mapping[str, Any], messages: Messages) -> list[dict[str, Any]] | None:
    """Returns what a user or tools say to the last answer; None: the episode has ended."""
    return asyncio.run(_played(record, messages, scores=False)).asked

  def reward(self, record: Mapping[str, Any], messages: Messages) -> float:
    """Returns the sum of the weighted rewards of the task and its Env."""
    trace = asyncio.run(_played(record, messages, scores=True)).trace
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
      raise ValueError(f'the rewards {", ".join(missing)} were not computed')
    return float(trace.reward)


def write(taskset: str, options: Mapping[str, Any], path: str) -> None:
  """Writes the prompts of a taskset.

  Args:
    taskset: Its id.
    options: Those of its configuration; and `limit`, the number of tasks.
    path: The file.
  """
  records, text = [], json.dumps(options, sort_keys=True)
  env = _env(taskset, text)
  for number, task in enumerate(_tasks(taskset, text)):
    player = Player(functools.partial(_servers, env))
    asyncio.run(player.play(env, task))
    if player.asked is None:
      raise ValueError(f'the Env of {taskset} says nothing to its agent, which is not supported')
    tools = [schema(function, name) for name, function in tools_of(_servers(env, task)).items()]
    given = {'taskset': taskset, 'options': options, 'number': number, 'hash': task.hash}
    of_tools = {'tools': tools} if tools else {}
    records.append({'messages': player.asked, **of_tools, 'verifiers': given})
  write_records(path, records)


async def _played(record: Mapping[str, Any], messages: Messages, scores: bool) -> Player:
  """Plays an episode."""
  from verifiers.v1.episode import EnvInfo, Episode

  given = record['verifiers']
  options = json.dumps(given['options'], sort_keys=True)
  env = _env(given['taskset'], options)
  task = _tasks(given['taskset'], options)[given['number']]
  if task.hash != given['hash']:
    raise ValueError(f'the taskset {given["taskset"]} has changed since its prompts were written')
  player = Player(functools.partial(_servers, env), messages, len(record['messages']), scores)
  await player.play(env, task)
  if scores:
    episode = Episode(env=EnvInfo(), task=player.trace.task, traces=player.traces)
    await env.finalize(task, episode)
  return player


@functools.lru_cache(16)
def _env(taskset: str, options: str) -> Any:
  from verifiers.v1.configs.agent import AgentConfig
  from verifiers.v1.env import Env
  from verifiers.v1.utils import loaders

  with contextlib.suppress(ImportError):  # which the loader tells better
    import_named(taskset.rpartition('/')[2].partition('@')[0].replace('-', '_').lower())
  given = {name: value for name, value in parsed(options).items() if name != 'limit'}
  fields = loaders.env_config_type(taskset).model_fields.items()
  agents = [name for name, field in fields if isinstance(field.default, AgentConfig)]
  if len(agents) != 1:
    raise ValueError(f'{taskset} has {len(agents)} agents; one is supported')
  agent = {agents[0]: {'harness': {'id': 'null'}}}
  env = loaders.load_environment(
    loaders.resolve_env_config({'taskset': {**given, 'id': taskset}, **agent})
  )
  if type(env).start is not Env.start:
    raise ValueError(f'{taskset} starts servers, which is not supported')
  return env


@functools.lru_cache(16)
def _tasks(taskset: str, options: str) -> list[Any]:
  found, limit = _env(taskset, options).taskset, parsed(options).get('limit')
  if limit is not None and not isinstance(limit, int):
    raise ValueError(f'limit={limit} is no number of tasks')
  if not found.bounded and limit is None:
    raise ValueError(f'{taskset} has no end: limit=N takes the first N tasks')
  return [*(found if limit is None else found.take(limit))]


def _servers(env: Any, task: Any) -> list[Any]:
  """Returns new toolsets of a task, and those of its taskset where it is one of it."""
  is_own = isinstance(task, type(env.taskset).task_type())
  shared = env.taskset.toolsets(env.taskset.config) if is_own else []
  return [*shared, *task.toolsets(task.config)]
