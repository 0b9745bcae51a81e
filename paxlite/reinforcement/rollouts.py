"""Batches of episodes that the newest parameters generate, with their rewards."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch, permute
from paxlite.data.rollouts import RolloutInput
from paxlite.data.text_encoding import TextEncoding
from paxlite.generation.engine import Engine
from paxlite.generation.request import Answer, Request
from paxlite.generation.sampling import Sampling
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import partitioning
from paxlite.reinforcement.advantages import Scale, advantages
from paxlite.reinforcement.prompts import Prompt, Prompts
from paxlite.reinforcement.user_processes import Call, UserProcesses

_PROCESSES = 4  # for rewards
_MOST_ROWS = 128  # that are generated at a time


@dataclasses.dataclass(frozen=True)
class Judges:
  """What says how good an episode is.

  Attributes:
    rewards: Dotted paths of functions of (record, answer), whose results are added.
    weights: The factor of each.
    environment: The dotted path of a class of environments, whose reward is added; '': there is
      none, and an episode is one answer.
    max_turns: The most answers of an episode.
    seconds: The most seconds of a call.
  """

  rewards: Sequence[str]
  weights: Sequence[float]
  environment: str = ''
  max_turns: int = 1
  seconds: float = 10.0


@dataclasses.dataclass
class Episode:
  """One prompt and what followed.

  Attributes:
    prompt: The prompt.
    ids: All tokens.
    is_own: Whether the model wrote each token.
    messages: What was said after the prompt.
    is_over: Whether the episode has ended.
    is_cut: Whether an answer was as long as it may be.
  """

  prompt: Prompt
  ids: list[int]
  is_own: list[bool]
  messages: list[Mapping[str, Any]]
  is_over: bool = False
  is_cut: bool = False


class Rollouts(RolloutInput):
  """One episode a row; N neighboring rows are a group, which has one prompt.

  What is generated depends on the parameters, the seed and the number of the batch alone.

  Args:
    prompts: The prompts.
    engine: Generates, by its sampling; its parameters are set for each batch.
    judges: The rewards.
    encoding: Turns texts and conversations to ids.
    groups: The number of prompts of a batch.
    group_size: N.
    seq_len: T.
    max_tokens: The most new tokens of an answer.
    seed: Of the order of the prompts and of all that is drawn.
    scale: See `advantages`.
    max_token_id: The largest id that the model has.
  """

  def __init__(
    self,
    prompts: Prompts,
    engine: Engine,
    judges: Judges,
    encoding: TextEncoding,
    groups: int,
    group_size: int,
    seq_len: int,
    max_tokens: int,
    seed: int,
    scale: Scale,
    max_token_id: int,
  ):
    self.batch_size, self.seq_len = groups * group_size, seq_len
    self.max_token_id, self.name = max_token_id, prompts.name
    self._prompts, self._engine, self._judges, self._encoding = prompts, engine, judges, encoding
    self._groups, self._group_size, self._max_tokens = groups, group_size, max_tokens
    self._seed, self._scale = seed, scale
    self._processes = UserProcesses(min(_PROCESSES, os.cpu_count() or 1), judges.seconds)
    if judges.environment and jax.process_count() > 1:
      raise UserError(
        f'ENVIRONMENT={judges.environment}: what an environment replies is not sent to other '
        'processes, and this run has several. Start it as one process'
      )
    found = [Call(path, None, None) for path in judges.rewards]
    if judges.environment:
      found += [Call(judges.environment, name, None) for name in ('reply', 'reward')]
    self._processes.look_up(found)  # what is missing is said before anything is compiled

  def state(self) -> JsonObject:
    return {}  # the number of the batch says all

  def restore(self, state: JsonObject) -> None:
    pass

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    like = jax.ShapeDtypeStruct((self.batch_size, self.seq_len), 'float32')
    return super().shapes() | {'advantages': like, 'rewards': like}

  def next_batch(self, params: PyTree, number: int, rows: slice) -> Batch:
    self._engine.params = params
    try:
      episodes = self.episodes(number)
    finally:
      self._engine.params = None  # room for the step, which overwrites them
    rewards = self._rewards(episodes, rows)
    scaled = advantages(rewards.reshape(self._groups, self._group_size), self._scale).reshape(-1)
    mine = zip(episodes[rows], rewards[rows], scaled[rows], strict=True)
    made = [self._row(episode, reward, value) for episode, reward, value in mine]
    return {name: np.stack([row[name] for row in made]) for name in made[0]}

  def episodes(self, number: int) -> list[Episode]:
    """Returns the episodes of the batch of this number, by the parameters of the engine."""
    found = [
      Episode(prompt, list(prompt.ids), [False] * len(prompt.ids), [])
      for prompt in self._drawn(number)
      for _ in range(self._group_size)
    ]
    for turn in range(max(1, self._judges.max_turns)):
      open_ = [i for i, episode in enumerate(found) if not episode.is_over]
      if not open_:
        break
      answers = self._engine.generate([self._request(found[i], number, i, turn) for i in open_])
      for i, answer in zip(open_, answers, strict=True):
        self._said(found[i], answer)
      if turn + 1 < self._judges.max_turns:
        self._replied([found[i] for i in open_])
    return found

  def _drawn(self, number: int) -> list[Prompt]:
    """Returns the prompts of a batch: all of them once, in an order of its own in each epoch."""
    places = number * self._groups + np.arange(self._groups)
    epochs, indices = np.divmod(places, len(self._prompts))
    for epoch in np.unique(epochs):
      of = epochs == epoch
      indices[of] = permute(indices[of], len(self._prompts), self._seed, int(epoch))
    return [self._prompts[int(i)] for i in indices]

  def _request(self, episode: Episode, number: int, i: int, turn: int) -> Request:
    seed = (self._seed << 32) + number
    sample = i * max(1, self._judges.max_turns) + turn
    room = min(self.seq_len + 1, self._engine.max_length) - len(episode.ids)
    return Request(
      episode.ids,
      min(self._max_tokens, room),
      self._engine.sampling,
      seed,
      sample,
      ends=self._engine.ends,
    )

  def _said(self, episode: Episode, answer: Answer) -> None:
    """Appends an answer with the token that ended it, which is learned too."""
    ids = [*answer.ids]
    if answer.finish == 'stop' and answer.end is not None:
      ids.append(answer.end)
    episode.ids += ids
    episode.is_own += [True] * len(ids)
    episode.messages.append({'role': 'assistant', 'content': answer.text})
    episode.is_cut = answer.finish == 'length'
    full = len(episode.ids) >= min(self.seq_len + 1, self._engine.max_length)
    episode.is_over = episode.is_cut or full or self._judges.max_turns <= 1

  def _replied(self, episodes: Sequence[Episode]) -> None:
    """Appends what the environment replies, or ends episodes."""
    going = [episode for episode in episodes if not episode.is_over]
    calls = [
      Call(self._judges.environment, 'reply', [e.prompt.record, [*e.prompt.messages, *e.messages]])
      for e in going
    ]
    for episode, reply in zip(going, self._processes.results(calls), strict=True):
      if reply is None:
        episode.is_over = True
        continue
      message = {'role': 'user', 'content': reply} if isinstance(reply, str) else reply
      new = self._after(episode, message)
      if len(episode.ids) + len(new) >= self.seq_len:
        episode.is_over = True
        continue
      episode.messages.append(message)
      episode.ids += new
      episode.is_own += [False] * len(new)

  def _after(self, episode: Episode, message: Mapping[str, Any]) -> list[int]:
    """Returns the ids between the end of an answer and the beginning of the next one."""
    before = [*episode.prompt.messages, *episode.messages]
    whole = self._encoding.chat_text([*before, message], True)
    start = self._encoding.chat_text(before, False)
    # the answer has the token that ended it already, and not what the template puts behind that
    end = self._encoding.tokenizer.decode_marked(episode.ids[-1:])
    if end in start:
      start = start[: start.rfind(end) + len(end)]
    if not whole.startswith(start):
      raise UserError(
        'the chat template changes earlier messages when another one follows, so that a '
        'conversation cannot go on token by token: choose another CHAT_TEMPLATE'
      )
    return self._encoding.marked(whole[len(start) :])

  def _rewards(self, episodes: Sequence[Episode], rows: slice) -> np.ndarray:
    """Returns the reward of each episode; each process has those of its rows computed."""
    mine = episodes[rows]
    total = np.zeros(len(mine), np.float64)
    judges = self._judges
    for path, weight in zip(judges.rewards, judges.weights, strict=True):
      answers = [e.messages[-1]['content'] for e in mine]
      calls = [Call(path, None, [e.prompt.record, a]) for e, a in zip(mine, answers, strict=True)]
      total += weight * self._judged(path, mine, calls)
    if judges.environment:
      calls = [
        Call(judges.environment, 'reward', [e.prompt.record, [*e.prompt.messages, *e.messages]])
        for e in mine
      ]
      total += self._judged(judges.environment, mine, calls)
    whole = np.full(len(episodes), np.nan, np.float32)
    whole[rows] = total
    if jax.process_count() > 1:  # several processes may have the same rows
      whole = np.nanmax(multihost_utils.process_allgather(whole), axis=0)
    return whole

  def _judged(self, path: str, episodes: Sequence[Episode], calls: Sequence[Call]) -> np.ndarray:
    found = self._processes.results(calls)
    for episode, reward in zip(episodes, found, strict=True):
      if not isinstance(reward, int | float) or not math.isfinite(reward):
        answer = episode.messages[-1]['content']
        raise UserError(
          f'{path} returned {reward!r} for {episode.prompt.place} and the answer {answer[:60]!r}: '
          'a reward must be a finite number'
        )
    return np.array(found, np.float64)

  def _row(self, episode: Episode, reward: float, value: float) -> Batch:
    """Returns the arrays [T] of an episode; the label of a token is the one after it."""
    T = self.seq_len
    ids, own = episode.ids[: T + 1], np.array(episode.is_own[1 : T + 1], np.float32)
    padded = lambda x, dtype: np.pad(np.asarray(x, dtype), (0, T - len(x)))
    rewards = np.zeros(T, np.float32)
    rewards[np.flatnonzero(own)[-1]] = reward
    return {
      'ids': padded(ids[:-1], np.int32),
      'labels': padded(ids[1:], np.int32),
      'weights': padded(own, np.float32),
      'advantages': padded(own * np.float32(value), np.float32),
      'rewards': rewards,
    }


def engine_of(
  encoding: TextEncoding,
  model: TransformerLm,
  mesh: Mesh,
  rules: partitioning.Rules,
  max_length: int,
  sampling: Sampling,
  rows: int,
) -> Engine:
  """Returns an engine for rollouts, without parameters.

  Args:
    encoding: Says which tokens end an answer.
    model: The model that is trained.
    mesh, rules, max_length, sampling: See Engine.
    rows: The number of episodes of a batch.
  """
  tokenizer = encoding.tokenizer
  return Engine(
    model,
    None,
    max_length,
    sampling,
    ends=encoding.chat_eos_ids,
    is_token=tokenizer.is_token,
    tokenizer=tokenizer,
    mesh=mesh,
    rules=rules,
    most_rows=min(rows, _MOST_ROWS),
  )
