"""The user's functions that reward episodes and reply to answers."""

import concurrent.futures
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paxlite.chats.conversations import ROLES
from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.prompts import SCHEMAS
from paxlite.finetuning.reinforcement.tools import message
from paxlite.finetuning.reinforcement.user_processes import Call, UserProcesses
from paxlite.processes.process_messages import broadcast, gathered_in_turn

log = logging.getLogger('paxlite')

_PROCESSES = 4
_MOST = float(np.finfo(np.float32).max)
_HALF = re.compile('[\ud800-\udfff]')  # of a surrogate pair
_TOOLS = 'paxlite.finetuning.reinforcement.tools.reply'


class _Rewards(NamedTuple):
  """Rewards of E episodes, arrays [E]."""

  total: np.ndarray  # the weighted sum
  outcome: np.ndarray  # the part of it that no turn has
  named: Mapping[str, np.ndarray]  # by name, before they are weighted


class Judges:
  """The rewards of episodes and the replies of their environment, computed in processes.

  Args:
    rewards: Dotted paths of functions of (record, answer), whose results are added.
    weights: The factor of each.
    environment: The dotted path of a class of environments, whose reward is added; '': there is
      none, and an episode is one answer.
    seconds: The most seconds of a call.
    tools: Dotted paths of functions that answers may call.

  Raises:
    UserError: One of them is not there, or its module raises.

  Attributes:
    named_code: The arguments that name functions and classes by dotted paths.
  """

  named_code = 'rewards', 'environment', 'tools'

  def __init__(
    self,
    rewards: Sequence[str],
    weights: Sequence[float],
    environment: str = '',
    seconds: float = 10.0,
    tools: Sequence[str] = (),
  ):
    self._named, self._environment = tuple(zip(rewards, weights, strict=True)), environment
    self._tools = list(tools)
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._processes = UserProcesses(min(_PROCESSES, os.cpu_count() or 1), seconds)
    found = [Call(path, None, None) for path in rewards]
    if environment:
      found += [Call(environment, name, None) for name in ('reply', 'reward')]
    if tools:
      found += [Call(SCHEMAS, None, [self._tools])]
    self._processes.look_up(found)  # what is missing is said before anything is compiled

  def replies(self, episodes: Sequence[Episode]) -> list[list[Mapping[str, Any]] | None]:
    """Returns the messages that follow the last answer of each episode; None: it has ended.

    Every process calls this, and the environment of the first one replies. Functions answer their
    calls, and the environment other answers. An episode gets its `error` where that fails.
    """
    said: list[Any] = []
    if jax.process_index() == 0:
      said = self._said(episodes)
    said = parsed(broadcast(json.dumps(said).encode()))
    for episode, (_, error) in zip(episodes, said, strict=True):
      episode.error = error
    return [messages for messages, _ in said]

  def _said(self, episodes: Sequence[Episode]) -> list[tuple[list[Any] | None, str]]:
    """Returns the messages that follow each answer, and what went wrong."""
    found: list[tuple[list[Any] | None, str]] = [(None, '') for _ in episodes]
    asked = [*range(len(episodes))]
    if self._tools:
      given = lambda i: [self._messages(episodes[i]), self._tools]
      calls = [Call(_TOOLS, None, given(i), str(episodes[i].prompt)) for i in asked]
      for i, called in zip([*asked], self._processes.outcomes(calls), strict=True):
        if isinstance(called, UserError):  # it took too long, or ended its process
          called = [message(0, 'error', f'error: {called}')]
        if called is not None:
          found[i] = called, ''
          asked.remove(i)
    if self._environment:
      replies = self._processes.outcomes([self._call('reply', episodes[i]) for i in asked])
      for i, reply in zip(asked, replies, strict=True):
        try:
          found[i] = self._checked(reply, episodes[i]), ''
        except UserError as e:
          found[i] = None, str(e)
    return found

  def _checked(self, reply: Any, episode: Episode) -> list[Mapping[str, Any]] | None:
    """Returns the messages that a reply is; UserError: it is an error, or nothing of that kind."""
    if isinstance(reply, UserError):
      raise reply
    if isinstance(reply, str):
      reply = {'role': 'user', 'content': reply}
    messages = [reply] if isinstance(reply, Mapping) else reply
    is_message = lambda x: (
      isinstance(x, Mapping) and _is_text(x.get('content')) and x.get('role') in ROLES
    )
    if reply is not None and not (isinstance(messages, list) and all(map(is_message, messages))):
      raise UserError(
        f'{self._environment}.reply returned {str(reply)[:60]!r} for {episode.prompt}: it must be '
        f'a text, messages with a role of {", ".join(ROLES)} and a content, or None'
      )
    return messages or None

  def rewards(self, episodes: Sequence[Episode]) -> np.ndarray:
    """Returns the reward of each episode, float32; each process has a part of them computed.

    The episodes get their `rewards` by name, before they are weighted, and the parts of the whole
    that belong to each answer and to none: `turn_rewards` and `outcome`. The reward of one that its
    environment has ended by an error is NaN.

    Raises:
      UserError: A reward raised, took too long, or is not a finite number; or all episodes failed.
    """
    return self._gathered(episodes, self._of(self._mine(episodes)))

  def begin(self, episodes: Sequence[Episode]) -> Callable[[], np.ndarray]:
    """Begins to compute rewards in a thread; the function that it returns waits for them."""
    future = self._thread.submit(self._of, self._mine(episodes))
    return lambda: self._gathered(episodes, future.result())

  def _mine(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
    """Returns those that this process has judged."""
    return episodes[jax.process_index() :: jax.process_count()]

  def _of(self, judged: Sequence[Episode]) -> _Rewards:
    total, found = np.zeros(len(judged), np.float64), {}
    if self._environment:  # first, for it may end episodes
      of_environment = self._of_environment(judged)
    whole_ones = [episode for episode in judged if not episode.error]
    for path, weight in self._named:
      given = lambda episode: [episode.prompt.record, episode.messages[-1]['content']]
      calls = [Call(path, None, given(e), str(e.prompt)) for e in whole_ones]
      found[path] = np.full(len(judged), math.nan)
      found[path][[not e.error for e in judged]] = self._judged(path, whole_ones, calls)
      total += weight * found[path]
    outcome = total.copy()  # what belongs to no answer
    if self._environment:
      found[self._environment] = of_environment
      total += found[self._environment]
      has_turns = [bool(episode.turn_rewards) for episode in judged]
      outcome += np.where(has_turns, 0, of_environment)
    return _Rewards(total, outcome, found)

  def _gathered(self, episodes: Sequence[Episode], found: _Rewards) -> np.ndarray:
    """Returns the rewards of all episodes, of which this process has `found` its own."""
    index, count = jax.process_index(), jax.process_count()
    answers = max((sum(m['role'] == 'assistant' for m in e.messages) for e in episodes), default=0)
    of_turns = np.full((answers, len(episodes)), math.nan)  # NaN: the reward is not that of a turn
    for i in range(index, len(episodes), count):
      of_turns[: len(episodes[i].turn_rewards), i] = episodes[i].turn_rewards
    mine = [found.total, found.outcome, *found.named.values(), *of_turns[:, index::count]]
    whole = np.zeros((len(mine), len(episodes)), np.float32)
    whole[:, index::count] = mine
    if count > 1:
      whole = gathered_in_turn(whole.view(np.int32)).view(np.float32).sum(0)  # the others' are 0
    names = [*found.named]
    for episode, (_, of_none, *values) in zip(episodes, whole.T.tolist(), strict=True):
      named, turns = values[: len(names)], values[len(names) :]
      if any(map(math.isnan, named)):
        episode.error = episode.error or 'another process has said what is wrong'
      else:
        episode.rewards = dict(zip(names, named, strict=True))
        episode.outcome = of_none
        episode.turn_rewards = [x for x in turns if not math.isnan(x)]
    self._check_errors([episode.error for episode in episodes])
    return whole[0]

  def _check_errors(self, errors: Sequence[str]) -> None:
    """Warns of the first error of an environment; raises UserError if all episodes have one."""
    failed = [error for error in errors if error]
    if failed and len(failed) == len(errors):
      first = broadcast(failed[0].encode()).decode()  # all processes say the same
      raise UserError(f'the environment failed in all {len(errors)} episodes: {first}')
    if failed:
      log.warning(
        '%d of %d episodes were ended by errors of their environment and teach nothing: %s',
        len(failed), len(errors), failed[0],
      )  # fmt: skip

  def _of_environment(self, episodes: Sequence[Episode]) -> np.ndarray:
    """Returns the rewards of the environment; NaN for episodes that it has ended by an error."""
    asked = [i for i, episode in enumerate(episodes) if not episode.error]
    outcomes = self._processes.outcomes([self._call('reward', episodes[i]) for i in asked])
    total = np.full(len(episodes), math.nan)
    for i, given in zip(asked, outcomes, strict=True):
      try:
        total[i] = self._sum(given, episodes[i])
      except UserError as e:
        episodes[i].error = str(e)
    return total

  def _sum(self, given: Any, episode: Episode) -> float:
    """Returns the sum of rewards of turns, which the episode gets, or the one of the episode."""
    if isinstance(given, UserError):
      raise given
    if not isinstance(given, list):
      self._check(self._environment, episode, given)
      return float(given)
    answers = sum(m['role'] == 'assistant' for m in episode.messages)
    if len(given) != answers:
      raise UserError(
        f'{self._environment}.reward returned {len(given)} rewards for {episode.prompt}: it must '
        f'return a number, or one for each of the {answers} answers'
      )
    for one in given:
      self._check(self._environment, episode, one)
    self._check(self._environment, episode, sum(given))
    episode.turn_rewards = [float(one) for one in given]
    return float(sum(given))

  def _messages(self, episode: Episode) -> list[Mapping[str, Any]]:
    return [*episode.prompt.messages, *episode.messages]

  def _call(self, method: str, episode: Episode) -> Call:
    given = [episode.prompt.record, self._messages(episode)]
    return Call(self._environment, method, given, str(episode.prompt))

  def _judged(self, path: str, episodes: Sequence[Episode], calls: Sequence[Call]) -> np.ndarray:
    found = self._processes.results(calls)
    for episode, reward in zip(episodes, found, strict=True):
      self._check(path, episode, reward)
    return np.array(found, np.float64)

  def _check(self, path: str, episode: Episode, reward: Any) -> None:
    if not isinstance(reward, int | float) or not abs(reward) <= _MOST:
      answer = episode.messages[-1]['content']
      raise UserError(
        f'{path} returned {repr(reward)[:60]} for {episode.prompt} and the answer {answer[:60]!r}: '
        'a reward must be a finite number'
      )


def _is_text(content: Any) -> bool:
  """Whether something is a text that has tokens, without half of a surrogate pair."""
  return isinstance(content, str) and not _HALF.search(content)
