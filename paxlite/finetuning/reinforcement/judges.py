"""The user's functions that reward episodes and reply to answers."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.chats.conversations import ROLES
from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.user_processes import Call, UserProcesses
from paxlite.processes.process_messages import broadcast

_PROCESSES = 4


class Judges:
  """The rewards of episodes and the replies of their environment, computed in processes.

  Args:
    rewards: Dotted paths of functions of (record, answer), whose results are added.
    weights: The factor of each.
    environment: The dotted path of a class of environments, whose reward is added; '': there is
      none, and an episode is one answer.
    seconds: The most seconds of a call.

  Raises:
    UserError: One of them is not there, or its module raises.

  Attributes:
    named_code: The arguments that name functions and classes by dotted paths.
  """

  named_code = 'rewards', 'environment'

  def __init__(
    self,
    rewards: Sequence[str],
    weights: Sequence[float],
    environment: str = '',
    seconds: float = 10.0,
  ):
    self._named, self._environment = tuple(zip(rewards, weights, strict=True)), environment
    self._processes = UserProcesses(min(_PROCESSES, os.cpu_count() or 1), seconds)
    found = [Call(path, None, None) for path in rewards]
    if environment:
      found += [Call(environment, name, None) for name in ('reply', 'reward')]
    self._processes.look_up(found)  # what is missing is said before anything is compiled

  def replies(self, episodes: Sequence[Episode]) -> list[Mapping[str, Any] | None]:
    """Returns the message that follows the last answer of each episode; None: it has ended.

    Every process calls this, and the environment of the first one replies.
    """
    said: list[Any] = []
    if jax.process_index() == 0:
      said = self._processes.results([self._call('reply', episode) for episode in episodes])
    said = parsed(broadcast(json.dumps(said).encode()))
    return [self._message(*pair) for pair in zip(said, episodes, strict=True)]

  def _message(self, reply: Any, episode: Episode) -> Mapping[str, Any] | None:
    if isinstance(reply, str):
      return {'role': 'user', 'content': reply}
    is_message = isinstance(reply, Mapping) and isinstance(reply.get('content'), str)
    if reply is not None and not (is_message and reply.get('role') in ROLES):
      raise UserError(
        f'{self._environment}.reply returned {str(reply)[:60]!r} for {episode.prompt}: it '
        f'must be a text, a message with a role of {", ".join(ROLES)} and a content, or None'
      )
    return reply

  def rewards(self, episodes: Sequence[Episode]) -> np.ndarray:
    """Returns the reward of each episode, float32; each process has a part of them computed.

    The episodes get their `rewards` by name, before they are weighted.

    Raises:
      UserError: A reward raised, took too long, or is not a finite number.
    """
    index, count = jax.process_index(), jax.process_count()
    mine = [*range(index, len(episodes), count)]
    total, found = np.zeros(len(mine), np.float64), {}
    for path, weight in self._named:
      given = lambda episode: [episode.prompt.record, episode.messages[-1]['content']]
      judged = [episodes[i] for i in mine]
      calls = [Call(path, None, given(episode), str(episode.prompt)) for episode in judged]
      found[path] = self._judged(path, judged, calls)
      total += weight * found[path]
    if self._environment:
      calls = [self._call('reward', episodes[i]) for i in mine]
      found[self._environment] = self._judged(self._environment, [episodes[i] for i in mine], calls)
      total += found[self._environment]
    whole = np.zeros((1 + len(found), len(episodes)), np.float32)
    whole[:, mine] = [total, *found.values()]
    if count > 1:
      whole = multihost_utils.process_allgather(whole).sum(0)  # the others' are 0
    for episode, values in zip(episodes, whole[1:].T, strict=True):
      episode.rewards = dict(zip(found, values.tolist(), strict=True))
    return whole[0]

  def _call(self, method: str, episode: Episode) -> Call:
    messages = [*episode.prompt.messages, *episode.messages]
    return Call(self._environment, method, [episode.prompt.record, messages], str(episode.prompt))

  def _judged(self, path: str, episodes: Sequence[Episode], calls: Sequence[Call]) -> np.ndarray:
    found = self._processes.results(calls)
    for episode, reward in zip(episodes, found, strict=True):
      if not isinstance(reward, int | float) or not abs(reward) < math.inf:
        answer = episode.messages[-1]['content']
        raise UserError(
          f'{path} returned {reward!r} for {episode.prompt} and the answer {answer[:60]!r}: a '
          'reward must be a finite number'
        )
    return np.array(found, np.float64)
