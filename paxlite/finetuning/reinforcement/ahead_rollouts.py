"""Rollouts that are made before they are trained on, and answers that go on in the next rollout.

Both train on tokens that older parameters wrote, so each token has the log-probability of the
parameters that wrote it: see PolicyLoss. What is open when a run ends is in files of the run.
"""

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch
from paxlite.finetuning.reinforcement import kept_rollouts
from paxlite.finetuning.reinforcement.advantages import Credit, Scale, filled
from paxlite.finetuning.reinforcement.answer_rollouts import Answered, RolloutOptions, padded
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.label_log_probs import LabelLogProbs
from paxlite.finetuning.reinforcement.policy_loss import BEHAVIOUR, STALENESS
from paxlite.finetuning.reinforcement.policy_rollouts import PolicyRollouts

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


class AheadRollouts(PolicyRollouts):
  """Episodes by the parameters of earlier steps too.

  A rollout ends when as many groups have ended as it trains on. The episodes of further groups go
  on in the next rollout, by its parameters.

  Args:
    options, judges, group_size, scale, log_probs, credit: See PolicyRollouts.
    further: The number of further groups that are played at a time.
    ahead: How many rollouts are made before the one that is trained on; rewards are computed while
      they wait.
  """

  def __init__(
    self,
    options: RolloutOptions,
    judges: Judges,
    group_size: int,
    scale: Scale,
    log_probs: LabelLogProbs,
    credit: Credit = 'episode',
    further: int = 0,
    ahead: int = 0,
  ):
    super().__init__(options, judges, group_size, scale, credit, log_probs=log_probs)
    self._further, self._ahead = further, ahead
    self._behaviour = log_probs
    self._next = 0  # the rollout that is made next
    self._open: list[Group] = []
    self._made_ones: dict[int, list[Group]] = {}  # rollouts that are not trained on yet
    self._rewards: dict[int, Callable[[], np.ndarray]] = {}
    self._kept: JsonObject | None = None  # a state whose episodes are in files
    self._first = 0  # the number of the first batch of the rollout that is trained on

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().shapes()
    return shapes | dict.fromkeys((BEHAVIOUR, STALENESS), shapes['rewards'])

  def state(self) -> JsonObject:
    if self._kept is not None:
      return self._kept
    numbers = lambda groups: [group.number for group in groups]
    made = {str(rollout): numbers(groups) for rollout, groups in self._made_ones.items()}
    return {
      'position': self._position, 'next': self._next, 'open': numbers(self._open), 'made': made,
    }  # fmt: skip

  def restore(self, state: JsonObject) -> None:
    if 'next' in state:
      self._kept = state

  def _played(self, params: PyTree, number: int) -> tuple[list[Episode], np.ndarray]:
    if self._kept is not None:
      self._load(self._kept, number)
    self._first = number * self._steps
    for old in [rollout for rollout in self._made_ones if rollout < number]:  # after a rollback
      del self._made_ones[old], self._rewards[old]
    next_, self._next = self._next, number
    if number not in self._made_ones:  # it is the first one, or was lost
      self._make(params)
    self._next = max(self._next, next_)
    while self._next <= number + self._ahead:
      self._make(params)
    episodes = _episodes(self._made_ones.pop(number))
    rewards = self._rewards.pop(number)()
    return episodes, filled(rewards.reshape(-1, self._group_size))

  def _make(self, params: PyTree) -> None:
    """Makes the next rollout, and begins to compute its rewards."""
    while len(self._open) < self._groups + self._further:
      self._open.append(self._group(self._position))
      self._position += 1
    is_enough = lambda: sum(group.is_over for group in self._open) >= self._groups
    episodes, seed = _episodes(self._open), self._seed_of(self._next)
    self._actor.go_on(params, episodes, self._judges, seed, is_enough)
    self._note_probabilities(params, episodes)
    ended = [group for group in self._open if group.is_over][: self._groups]
    self._open = [group for group in self._open if all(group is not one for one in ended)]
    if (files := self.run_files) is not None:
      content = json.dumps({'made': _to_json(ended), 'open': _to_json(self._open)})
      arrays = {_KIND: np.frombuffer(content.encode(), np.uint8)}
      self._written(lambda: kept_rollouts.write(files, self._next, arrays, self._steps, _KIND))
    self._set(self._next, ended)
    self._next += 1

  def _set(self, rollout: int, groups: list[Group]) -> None:
    self._made_ones[rollout] = groups
    self._rewards[rollout] = self._judges.begin(_episodes(groups))

  def _group(self, number: int) -> Group:
    (prompt,) = self._drawn(number, 1)
    return Group(number, [Episode.of(prompt) for _ in range(self._group_size)])

  def _note_probabilities(self, params: PyTree, episodes: Sequence[Episode]) -> None:
    """Notes the log-probabilities of the tokens that were just written."""
    new = [episode for episode in episodes if len(episode.written) < len(episode.ids)]
    rows = [self._own_row(episode) for episode in new]
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    found = self._behaviour(params, arrays)
    for episode, of_labels in zip(new, found.tolist(), strict=True):
      start = len(episode.written)
      own = episode.is_own[start:]
      before = [0.0, *of_labels][start : len(episode.ids)]
      episode.log_probs += [x if mine else 0.0 for x, mine in zip(before, own, strict=True)]
      episode.written += [self._first if mine else 0 for mine in own]

  def _row(self, answered: Answered) -> Batch:
    row, episode, T = super()._row(answered), answered.episode, self.seq_len
    stale = row['weights'] * (self._first - padded(episode.written[1 : T + 1], T, np.float32))
    return {
      **row, BEHAVIOUR: padded(episode.log_probs[1 : T + 1], T, np.float32), STALENESS: stale
    }  # fmt: skip

  def _load(self, state: JsonObject, number: int) -> None:
    """Continues from a state, with the episodes that files have."""
    self._kept = None
    made = {int(rollout): numbers for rollout, numbers in state['made'].items()}
    self._position, self._next = int(state['position']), int(state['next'])
    found = {
      rollout: self._groups_of(rollout, 'made', numbers) for rollout, numbers in made.items()
    }
    open_ = self._groups_of(self._next - 1, 'open', state['open'])
    is_whole = open_ is not None and all(groups is not None for groups in found.values())
    if bool(np.all(multihost_utils.process_allgather(np.int32(is_whole)))):
      self._open = open_ or []
      for rollout, groups in sorted(found.items()):
        self._set(rollout, groups or [])
      return
    if jax.process_index() == 0:
      log.warning(
        'The episodes that were made ahead are not in the run folder: their prompts are answered '
        'again from the checkpoint, so the run will not equal an uninterrupted one bit for bit'
      )
    self._next = number
    again = itertools.chain(*made.values(), state['open'])
    self._open = [self._group(place) for place in sorted(again)]

  def _groups_of(self, rollout: int, kind: str, numbers: Sequence[int]) -> list[Group] | None:
    """Returns groups that the file of a rollout has; None if it has not these."""
    if not numbers:
      return []
    arrays = None if self.run_files is None else kept_rollouts.read(self.run_files, rollout, _KIND)
    kept = [] if arrays is None else parsed(arrays[_KIND].tobytes())[kind]
    if [each['number'] for each in kept] != [*numbers]:
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
