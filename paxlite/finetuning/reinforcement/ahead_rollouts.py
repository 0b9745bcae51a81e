"""Rollouts that are made before they are trained on, and answers that go on in the next rollout.

Both train on tokens that older parameters wrote, so each token has the log-probability of the
parameters that wrote it: see PolicyLoss. What is open when a run ends is in files of the run.
"""

import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch
from paxlite.finetuning.reinforcement import kept_rollouts
from paxlite.finetuning.reinforcement.advantages import filled
from paxlite.finetuning.reinforcement.answer_rollouts import Answered, padded
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.label_log_probs import LabelLogProbs
from paxlite.finetuning.reinforcement.policy_loss import BEHAVIOUR, STALENESS
from paxlite.finetuning.reinforcement.policy_rollouts import PolicyOptions, PolicyRollouts
from paxlite.finetuning.reinforcement.rollout_devices import Generation, done
from paxlite.processes.process_messages import gathered_in_turn

log = logging.getLogger('paxlite')

_KIND = 'episodes'  # the end of the names of files
_KEPT = (
  *('ids', 'is_own', 'messages', 'is_over', 'is_cut', 'error'),
  *('num_open', 'log_probs', 'written', 'ends'),
)


@dataclasses.dataclass
class Group:
  """The episodes of one prompt, whose number is its place in the order of all prompts."""

  number: int
  episodes: list[Episode]

  @property
  def is_over(self) -> bool:
    return all(episode.is_over for episode in self.episodes)

  def began(self, now: int) -> int:
    """Returns the batch before which its first token was written; `now`: it has none yet."""
    pairs = (zip(e.written, e.is_own, strict=False) for e in self.episodes)
    return min((by for pair in pairs for by, is_own in pair if is_own), default=now)


class Made(NamedTuple):
  """A rollout: its groups, and what waits for their rewards."""

  groups: list[Group]
  rewards: Callable[[], np.ndarray]
  position: int  # of the first group that begins after it
  open: list[int]  # numbers of the groups that go on after it


class AheadRollouts(PolicyRollouts):
  """Episodes by the parameters of earlier steps too.

  A rollout ends when as many groups have ended as it trains on. The episodes of further groups go
  on in the next rollout, by its parameters. `Generation` says which parameters make which rollout.

  Args:
    options: What all rollouts are made with, `log_probs` among it.
    behaviour: Computes log-probabilities by the parameters that generate, where they are.
    further: The number of further groups that are played at a time.
    ahead: How many rollouts are made before the one that is trained on; rewards are computed while
      they wait.
    most_rollouts: The most rollouts by whose parameters an episode is written. Those that are about
      to need more are waited for, and so none is left out because it is long.
    beside: Whether they are made while training goes on, because the actor has its own devices.
  """

  def __init__(
    self,
    options: PolicyOptions,
    behaviour: LabelLogProbs,
    further: int = 0,
    ahead: int = 0,
    most_rollouts: int = 1,
    beside: bool = False,
  ):
    super().__init__(options)
    self._behaviour, self._generation = behaviour, Generation[Made](ahead, beside)
    self._further, self._most_rollouts = further, most_rollouts
    self._open: list[Group] = []  # what is being made changes it, and the position
    self._last = Made([], lambda: np.empty(0), 0, [])  # the last one that was drawn
    self._kept: JsonObject | None = None  # a state whose episodes are in files
    self._first = 0  # the number of the first batch of the rollout that is trained on

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().shapes()
    return shapes | dict.fromkeys((BEHAVIOUR, STALENESS), shapes['rewards'])

  def state(self) -> JsonObject:
    if self._kept is not None:
      return self._kept
    next_, begun, made = self._generation.finished()
    last = [self._last, *made.values()][-1]
    return {
      'position': last.position,
      'next': next_,
      'begun': begun,  # a save waits until files say how those go on
      'open': last.open,
      'made': {str(rollout): [g.number for g in one.groups] for rollout, one in made.items()},
    }

  def wait(self, state: JsonObject) -> None:
    self._generation.wait(state.get('begun', 0))

  def restore(self, state: JsonObject) -> None:
    if 'next' in state:
      self._kept = state

  def close(self) -> None:
    self._generation.close()

  def _played(self, params: PyTree, number: int) -> tuple[list[Episode], np.ndarray]:
    start = time.perf_counter()
    if self._kept is not None:
      self._load(self._kept)
    self._first = number * self._steps
    make = functools.partial(self._make, self._first)
    made = self._last = self._generation.draw(number, make, lambda: self._actor.placed(params))
    rewards = made.rewards()
    self.measured = self._generation.measured(start)
    return _episodes(made.groups), filled(rewards.reshape(-1, self._group_size))

  def _make(self, now: int, rollout: int, params: PyTree) -> Made:
    """Makes a rollout before the batch `now`, by its parameters, and begins its rewards."""
    while len(self._open) < self._groups + self._further:
      self._open.append(self._group(self._position))
      self._position += 1
    began = {group.number: group.began(now) for group in self._open}
    latest = now - (self._most_rollouts - 2) * self._steps

    def is_enough() -> bool:
      self._generation.check()
      ended, left = self._divided()
      # those that are left can end in their order, each in time
      is_in_time = (
        began[group.number] >= latest + i // self._groups * self._steps
        for i, group in enumerate(left)
      )
      is_full = len(ended) == self._groups
      return is_full and (all(is_in_time) or all(group.is_over for group in left))

    episodes, seed = _episodes(self._open), self._seed_of(rollout)
    self._actor.go_on(params, episodes, self._judges, seed, is_enough)
    self._note_probabilities(params, episodes, now)
    ended, self._open = self._divided()
    if (files := self.run_files) is not None:
      content = {'made': _to_json(ended), 'open': _to_json(self._open), 'position': self._position}
      arrays = {_KIND: np.frombuffer(json.dumps(content).encode(), np.uint8)}
      self._written(lambda: kept_rollouts.write(files, rollout, arrays, self._steps, _KIND))
    return self._with_rewards(ended)

  def _divided(self) -> tuple[list[Group], list[Group]]:
    """Returns the first groups that have ended, as many as a rollout has, and all others."""
    ended = [group for group in self._open if group.is_over][: self._groups]
    return ended, [group for group in self._open if all(group is not one for one in ended)]

  def _with_rewards(self, groups: list[Group]) -> Made:
    open_ = [group.number for group in self._open]
    return Made(groups, self._judges.begin(_episodes(groups)), self._position, open_)

  def _group(self, number: int) -> Group:
    (prompt,) = self._drawn(number, 1)
    return Group(number, [Episode.of(prompt) for _ in range(self._group_size)])

  def _note_probabilities(self, params: PyTree, episodes: Sequence[Episode], now: int) -> None:
    """Notes the log-probabilities of the tokens that were just written, before the batch `now`."""
    new = [episode for episode in episodes if len(episode.written) < len(episode.ids)]
    rows = [self._own_row(episode) for episode in new]
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    found = self._behaviour(params, arrays)
    for episode, of_labels in zip(new, found.tolist(), strict=True):
      start = len(episode.written)
      own = episode.is_own[start:]
      before = [0.0, *of_labels][start : len(episode.ids)]
      episode.log_probs += [x if mine else 0.0 for x, mine in zip(before, own, strict=True)]
      episode.written += [now if mine else 0 for mine in own]

  def _row(self, answered: Answered) -> Batch:
    row, episode, T = super()._row(answered), answered.episode, self.seq_len
    stale = row['weights'] * (self._first - padded(episode.written[1 : T + 1], T, np.float32))
    return {
      **row, BEHAVIOUR: padded(episode.log_probs[1 : T + 1], T, np.float32), STALENESS: stale
    }  # fmt: skip

  def _load(self, state: JsonObject) -> None:
    """Continues from a state, with the episodes that files have."""
    self._kept = None
    made = {int(rollout): numbers for rollout, numbers in state['made'].items()}
    self._position, next_ = int(state['position']), int(state['next'])
    begun = int(state.get('begun', next_))
    found = {
      rollout: self._groups_of(rollout, 'made', made.get(rollout))
      for rollout in [*made, *range(next_, begun)]
    }
    open_ = self._groups_of(begun - 1, 'open', state['open'] if begun == next_ else None)
    is_whole = open_ is not None and all(groups is not None for groups in found.values())
    if gathered_in_turn(np.array([is_whole], np.int32)).all():
      self._open = open_ or []
      self._position = self._file(begun - 1).get('position', self._position)
      for rollout, groups in sorted(found.items()):
        self._generation.made[rollout] = done(self._with_rewards(groups or []))
      self._generation.next = begun
      return
    if jax.process_index() == 0:
      log.warning(
        'The episodes that were made ahead are not in the run folder: their prompts are answered '
        'again from the checkpoint, so the run will not equal an uninterrupted one bit for bit'
      )
    again = itertools.chain(*made.values(), state['open'])
    self._open = [self._group(place) for place in sorted(again)]

  def _file(self, rollout: int) -> JsonObject:
    """Returns what the file of a rollout has; nothing if there is none."""
    arrays = None if self.run_files is None else kept_rollouts.read(self.run_files, rollout, _KIND)
    return {} if arrays is None else parsed(arrays[_KIND].tobytes())

  def _groups_of(self, rollout: int, kind: str, numbers: list[int] | None) -> list[Group] | None:
    """Returns groups that the file of a rollout has; None if it has not these (None: any)."""
    if numbers is not None and not numbers:
      return []
    kept = self._file(rollout).get(kind)
    if kept is None or (numbers is not None and [each['number'] for each in kept] != [*numbers]):
      return None
    found = []
    for each in kept:
      group = self._group(each['number'])
      for episode, values in zip(group.episodes, each['episodes'], strict=True):
        for name in _KEPT:
          setattr(episode, name, values[name])
      found.append(group)
    return found


def _episodes(groups: Sequence[Group]) -> list[Episode]:
  return [episode for group in groups for episode in group.episodes]


def _to_json(groups: Sequence[Group]) -> list[JsonObject]:
  kept = lambda episode: {name: getattr(episode, name) for name in _KEPT}
  return [{'number': g.number, 'episodes': [*map(kept, g.episodes)]} for g in groups]
