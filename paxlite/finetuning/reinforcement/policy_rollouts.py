"""Batches of episodes with their rewards, by the parameters that are trained."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch
from paxlite.finetuning.reinforcement.advantages import (
  Credit,
  Scale,
  advantages,
  filled,
  turn_advantages,
)
from paxlite.finetuning.reinforcement.answer_rollouts import (
  Answered,
  AnswerRollouts,
  RolloutOptions,
  padded,
)
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.label_log_probs import LabelLogProbs
from paxlite.finetuning.reinforcement.policy_loss import OLD


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyOptions(RolloutOptions):
  """What rollouts with rewards are made with.

  Attributes:
    judges: Their rewards.
    group_size: N.
    scale: See `advantages`.
    credit: What an answer gets: the advantage of its episode, or (turn) what `turn_advantages`
      gives its turn.
    log_probs: Computes those of the labels before the first of several steps; None: there is one.
  """

  judges: Judges
  group_size: int
  scale: Scale
  credit: Credit = 'episode'
  log_probs: LabelLogProbs | None = None


class PolicyRollouts(AnswerRollouts):
  """Episodes; N neighboring ones are a group, which has one prompt.

  What is generated depends on the prompts drawn before too, where prompts are drawn again.

  Args:
    options: What all rollouts are made with.
    rounds: The most times that prompts are drawn for a rollout, until enough groups have unequal
      rewards (https://arxiv.org/abs/2503.14476, section 3.2).
  """

  def __init__(self, options: PolicyOptions, rounds: int = 1):
    super().__init__(options)
    self._judges, self._log_probs = options.judges, options.log_probs
    self._scale, self._credit = options.scale, options.credit
    self._group_size = options.group_size
    self._groups = options.batch_size // options.group_size * options.batches  # of a rollout
    self._rounds = rounds
    self._position = 0  # of the next prompt, where they are drawn again

  def state(self) -> JsonObject:
    # without further rounds, the number of the batch says all
    return {'position': self._position} if self._rounds > 1 else {}

  def restore(self, state: JsonObject) -> None:
    self._position = int(state.get('position', 0))

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    like = jax.ShapeDtypeStruct((self.batch_size, self.seq_len), 'float32')
    own = ['advantages', 'rewards', *([OLD] if self._has_old else [])]
    return super().shapes() | dict.fromkeys(own, like)

  def _made(self, params: PyTree, number: int) -> Batch:
    arrays = super()._made(params, number)
    if self._has_old:
      assert self._log_probs is not None
      arrays = {**arrays, OLD: self._log_probs(params, arrays)}
    return arrays

  @property
  def _has_old(self) -> bool:
    """Whether there are several steps, of which the first one's probabilities are needed."""
    return self._log_probs is not None and self._steps > 1

  def _answered(self, params: PyTree, number: int) -> list[Answered]:
    episodes, rewards_GN = self._played(params, number)
    if self._credit == 'turn':
      values = self._of_turns(episodes)
    else:
      values = advantages(rewards_GN, self._scale).reshape(-1, 1)
    values[[bool(episode.error) for episode in episodes]] = 0  # which teach nothing
    each = zip(episodes, rewards_GN.reshape(-1).tolist(), values.tolist(), strict=True)
    return [Answered(e, _facts(e, reward, of_turns)) for e, reward, of_turns in each]

  def _of_turns(self, episodes: Sequence[Episode]) -> np.ndarray:
    """Returns the advantage of each answer of each episode, [E, K]."""
    size, count = self._group_size, max(len(e.ends) for e in episodes)
    turns, outcomes = np.zeros((len(episodes), count)), np.zeros(len(episodes))
    answers = np.array([0 if e.error else len(e.ends) for e in episodes])
    for i in np.flatnonzero(answers).tolist():
      outcomes[i] = episodes[i].outcome
      turns[i, : len(episodes[i].turn_rewards)] = episodes[i].turn_rewards
    outcomes_GN, answers_GN = outcomes.reshape(-1, size), answers.reshape(-1, size)
    turns_GNK = turns.reshape(-1, size, count)
    return turn_advantages(turns_GNK, outcomes_GN, answers_GN, self._scale).reshape(-1, count)

  def _played(self, params: PyTree, number: int) -> tuple[list[Episode], np.ndarray]:
    """Returns the episodes of a rollout and their rewards, [G, N]."""
    size, seed = self._group_size, self._seed_of(number)
    unequal: list[tuple[list[Episode], np.ndarray]] = []  # groups that say what is better
    equal: list[tuple[list[Episode], np.ndarray]] = []
    place = self._position if self._rounds > 1 else number * self._groups
    for round_ in range(self._rounds):
      prompts = [p for p in self._drawn(place, self._groups) for _ in range(size)]
      place += self._groups
      first = round_ * len(prompts)
      episodes = self._actor.play(params, prompts, self._judges, seed, first)
      rewards_GN = filled(self._judges.rewards(episodes).reshape(-1, size))
      for g, rewards_N in enumerate(rewards_GN):
        group = episodes[g * size : (g + 1) * size]
        is_equal = self._rounds > 1 and np.ptp(rewards_N) == 0 and self._has_equal_turns(group)
        (equal if is_equal else unequal).append((group, rewards_N))
      if len(unequal) >= self._groups:
        break
    self._position = place
    kept = [*unequal, *equal][: self._groups]
    return [e for group, _ in kept for e in group], np.stack([rewards for _, rewards in kept])

  def _has_equal_turns(self, group: Sequence[Episode]) -> bool:
    return self._credit != 'turn' or len({(*e.turn_rewards,) for e in group}) < 2

  def _row(self, answered: Answered) -> Batch:
    row, (episode, facts), T = super()._row(answered), answered, self.seq_len
    rewards = np.zeros(T, np.float32)
    rewards[np.flatnonzero(row['weights'])[-1]] = facts['reward']
    each = facts.get('turn_advantages') or [facts['advantage']] * len(episode.ends)
    of_tokens = np.repeat(np.array(each, np.float32), np.diff(episode.ends, prepend=0))
    return {
      **row,
      'advantages': row['weights'] * padded(of_tokens[1 : T + 1].tolist(), T, np.float32),
      'rewards': rewards,
    }


def _facts(episode: Episode, reward: float, values: Sequence[float]) -> JsonObject:
  """Returns what episodes.jsonl has of an episode with the advantages of its answers, or of all."""
  found: JsonObject = {'rewards': episode.rewards, 'reward': reward, 'advantage': values[0]}
  if len(values) > 1:
    found |= {
      'turn_rewards': episode.turn_rewards,
      'turn_advantages': [*values[: len(episode.ends)]],
    }
  return found | ({'error': episode.error} if episode.error else {})
