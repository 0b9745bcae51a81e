"""Batches of episodes with their rewards, by the parameters that are trained."""

import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch, permute
from paxlite.finetuning.reinforcement import kept_rollouts
from paxlite.finetuning.reinforcement.actor import Actor
from paxlite.finetuning.reinforcement.advantages import Scale, advantages
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.label_log_probs import LabelLogProbs
from paxlite.finetuning.reinforcement.policy_loss import OLD
from paxlite.finetuning.reinforcement.prompts import Prompt, Prompts
from paxlite.finetuning.reinforcement.rollouts import RolloutInput
from paxlite.tracking.writers import EpisodeRecords

log = logging.getLogger('paxlite')


class PolicyRollouts(RolloutInput):
  """One episode a row; N neighboring rows are a group, which has one prompt.

  A rollout is what is generated at a time, by the same parameters: one batch or several. Each of
  them is trained on once or several times. What is generated depends on the parameters, the seed,
  the number of the rollout and, where prompts are drawn again, on the prompts drawn before.

  Args:
    prompts: The prompts.
    actor: Plays the episodes.
    judges: Their rewards.
    groups: The number of prompts of a batch.
    group_size: N.
    seq_len: T.
    seed: Of the order of the prompts and of all that is drawn.
    scale: See `advantages`.
    max_token_id: The largest id that the model has.
    batches: The number of batches of a rollout.
    updates: How many times each batch is trained on.
    rounds: The most times that prompts are drawn for a rollout, until enough groups have unequal
      rewards (https://arxiv.org/abs/2503.14476, section 3.2).
    log_probs: Computes those of the labels before the first of several steps; None: there is one.
    kept_episodes: How many episodes of each batch are written to episodes.jsonl.
  """

  def __init__(
    self,
    prompts: Prompts,
    actor: Actor,
    judges: Judges,
    groups: int,
    group_size: int,
    seq_len: int,
    seed: int,
    scale: Scale,
    max_token_id: int,
    batches: int = 1,
    updates: int = 1,
    rounds: int = 1,
    log_probs: LabelLogProbs | None = None,
    kept_episodes: int = 0,
  ):
    self.batch_size, self.seq_len = groups * group_size, seq_len
    self.max_token_id, self.name = max_token_id, prompts.name
    self.fingerprint, self.tokens_fingerprint = prompts.fingerprint, prompts.tokens_fingerprint
    self._prompts, self._actor, self._judges = prompts, actor, judges
    self._groups, self._group_size = groups * batches, group_size  # of a rollout
    self._seed, self._scale, self._log_probs = seed, scale, log_probs
    self._batches, self._steps, self._rounds = batches, batches * updates, rounds
    self._position = 0  # of the next prompt, where they are drawn again
    self._current: tuple[int, Batch] | None = None
    self._kept_episodes = kept_episodes
    self._episodes: EpisodeRecords | None = None
    self._failing = False  # to write files

  def state(self) -> JsonObject:
    # without further rounds, the number of the batch says all
    return {'position': self._position} if self._rounds > 1 else {}

  def restore(self, state: JsonObject) -> None:
    self._position = int(state.get('position', 0))

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    like = jax.ShapeDtypeStruct((self.batch_size, self.seq_len), 'float32')
    own = ['advantages', 'rewards', *([OLD] if self._log_probs else [])]
    return super().shapes() | dict.fromkeys(own, like)

  def next_batch(self, params: PyTree, number: int, rows: slice) -> Batch:
    rollout, step = divmod(number, self._steps)
    arrays = self._rollout(params, rollout, step)
    first = step % self._batches * self.batch_size
    return {k: x[first + rows.start : first + rows.stop] for k, x in arrays.items()}

  def _rollout(self, params: PyTree, number: int, step: int) -> Batch:
    """Returns all rows of a rollout, which is made at its first step."""
    if self._steps == 1:
      return self._made(params, number)
    if step and self._current is not None and self._current[0] == number:
      return self._current[1]
    arrays = self._found(number) if step else None
    if arrays is None:
      arrays = self._made(params, number)
      if (files := self.run_files) is not None:
        made = arrays
        self._written(lambda: kept_rollouts.write(files, number, made, self._steps))
    self._current = number, arrays
    return arrays

  def _written(self, write: Callable[[], None]) -> None:
    """Writes files of the run; training goes on if that fails, as on a full disk."""
    try:
      write()
      self._failing = False
    except OSError as e:
      if not self._failing:
        log.warning(
          'rollouts cannot be written, training continues: %s (%s)',
          e.strerror or e,
          e.filename or 'a file of the run',
        )
      self._failing = True

  def _found(self, number: int) -> Batch | None:
    """Returns a rollout from its file, if all processes have it."""
    arrays = None if self.run_files is None else kept_rollouts.read(self.run_files, number)
    shapes = {k: (self._batches * x.shape[0], *x.shape[1:]) for k, x in self.shapes().items()}
    is_whole = arrays is not None and {k: x.shape for k, x in arrays.items()} == shapes
    if bool(np.all(multihost_utils.process_allgather(np.int32(is_whole)))):
      return arrays
    if jax.process_index() == 0:
      log.warning(
        'The answers of the interrupted batch are not in the run folder: new ones are generated '
        'from the checkpoint, so the run will not equal an uninterrupted one bit for bit'
      )
    return None

  def _made(self, params: PyTree, number: int) -> Batch:
    episodes, rewards_GN = self._played(params, number)
    values = advantages(rewards_GN, self._scale).reshape(-1)
    each = [*zip(episodes, rewards_GN.reshape(-1).tolist(), values.tolist(), strict=True)]
    if self.run_files is not None and self.run_files.writes and self._kept_episodes:
      self._written(lambda: self._note(number, each))
    made = [self._row(*one) for one in each]
    arrays = {name: np.stack([row[name] for row in made]) for name in made[0]}
    return arrays if self._log_probs is None else {**arrays, OLD: self._log_probs(params, arrays)}

  def _note(self, number: int, made: Sequence[tuple[Episode, float, float]]) -> None:
    """Writes the first episodes of each batch of a rollout to episodes.jsonl."""
    assert self.run_files is not None
    first = number * self._steps
    if self._episodes is None:
      self._episodes = EpisodeRecords(self.run_files.folder.parent)
      self._episodes.rewind(first, first)
    records = []
    for batch in range(self._batches):
      rows = made[batch * self.batch_size :][: min(self._kept_episodes, self.batch_size)]
      at = [first + i for i in range(batch, self._steps, self._batches)]
      records += [_record(at, row, *one) for row, one in enumerate(rows)]
    self._episodes.episodes(records)

  def _played(self, params: PyTree, number: int) -> tuple[list[Episode], np.ndarray]:
    """Returns the episodes of a rollout and their rewards, [G, N]."""
    size, seed = self._group_size, (self._seed << 32) + number
    unequal: list[tuple[list[Episode], np.ndarray]] = []  # groups that say what is better
    equal: list[tuple[list[Episode], np.ndarray]] = []
    place = self._position if self._rounds > 1 else number * self._groups
    for round_ in range(self._rounds):
      prompts = [p for p in self._drawn(place, self._groups) for _ in range(size)]
      place += self._groups
      first = round_ * len(prompts)
      episodes = self._actor.play(params, prompts, self._judges, seed, first)
      rewards_GN = self._judges.rewards(episodes).reshape(-1, size)
      for g, rewards_N in enumerate(rewards_GN):
        is_equal = self._rounds > 1 and np.ptp(rewards_N) == 0
        (equal if is_equal else unequal).append((episodes[g * size : (g + 1) * size], rewards_N))
      if len(unequal) >= self._groups:
        break
    self._position = place
    kept = [*unequal, *equal][: self._groups]
    return [e for group, _ in kept for e in group], np.stack([rewards for _, rewards in kept])

  def _drawn(self, place: int, count: int) -> Sequence[Prompt]:
    """Returns prompts from a place on: all of them once, in an order of its own in each epoch."""
    epochs, indices = np.divmod(place + np.arange(count), len(self._prompts))
    for epoch in np.unique(epochs):
      of = epochs == epoch
      indices[of] = permute(indices[of], len(self._prompts), self._seed, int(epoch))
    return [self._prompts[int(i)] for i in indices]

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


def _record(
  batches: Sequence[int], row: int, episode: Episode, reward: float, advantage: float
) -> JsonObject:
  """Returns what is kept of an episode.

  Args:
    batches: The numbers of the batches that it is trained in.
    row: Its row in them.
    episode: The episode.
    reward: The weighted sum of its rewards.
    advantage: Its advantage.
  """
  prompt = episode.prompt
  return {
    'step': batches[0] + 1,
    'batches': list(batches),
    'row': row,
    'place': prompt.place,
    'prompt': list(prompt.messages) or prompt.record.get('prompt'),
    'answer': list(episode.messages),
    'is_cut': episode.is_cut,
    'rewards': episode.rewards,
    'reward': reward,
    'advantage': advantage,
  }
