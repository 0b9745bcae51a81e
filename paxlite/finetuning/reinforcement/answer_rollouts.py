"""Batches of answers of the model that is trained, by its parameters of that step."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple

import jax
import numpy as np

from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch, permute
from paxlite.finetuning.reinforcement import kept_rollouts
from paxlite.finetuning.reinforcement.actor import Actor
from paxlite.finetuning.reinforcement.engine_check import EngineAlarm, EngineCheck
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.packing import Packing
from paxlite.finetuning.reinforcement.prompts import Prompt, Prompts
from paxlite.finetuning.reinforcement.rollouts import RolloutInput
from paxlite.processes.process_messages import gathered_in_turn
from paxlite.tracking.writers import EpisodeRecords
from paxlite.training.callbacks import Callback

log = logging.getLogger('paxlite')


class Answered(NamedTuple):
  """An episode of a rollout, and what is known of it for episodes.jsonl besides what was said."""

  episode: Episode
  facts: JsonObject


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
  """What all rollouts are made with.

  Attributes:
    prompts: The prompts.
    actor: Plays the episodes.
    batch_size: The number of episodes of a batch.
    seq_len: T.
    seed: Of the order of the prompts and of all that is drawn.
    max_token_id: The largest id that the model has.
    batches: The number of batches of a rollout.
    updates: How many times each batch is trained on.
    kept_episodes: How many episodes of each batch are written to episodes.jsonl.
    packing: How episodes share rows; None: each has its own.
  """

  prompts: Prompts
  actor: Actor
  batch_size: int
  seq_len: int
  seed: int
  max_token_id: int
  batches: int = 1
  updates: int = 1
  kept_episodes: int = 0
  packing: Packing | None = None


class AnswerRollouts(RolloutInput):
  """One episode a row, or several as segments.

  A rollout is what is generated at a time, by the same parameters: one batch or several. Each of
  them is trained on once or several times. What is generated depends on the parameters, the seed
  and the number of the rollout.

  Args:
    options: What it is made with.
  """

  _of_places: ClassVar[Collection[str]] = ()
  """Names of arrays of indices of tokens in the row."""

  def __init__(self, options: RolloutOptions):
    self.batch_size, self.seq_len = options.batch_size, options.seq_len
    prompts = self._prompts = options.prompts
    self.max_token_id, self.name = options.max_token_id, prompts.name
    self.fingerprint, self.tokens_fingerprint = prompts.fingerprint, prompts.tokens_fingerprint
    self._actor, self._seed, self._batches = options.actor, options.seed, options.batches
    self._steps, self._kept_episodes = options.batches * options.updates, options.kept_episodes
    self._packing = options.packing
    self._current: tuple[int, Batch] | None = None
    self._episodes: EpisodeRecords | None = None
    self._failing = False  # to write files

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().shapes()
    of_segments = ('segment_ids', 'segment_pos') if self._packing else ()
    return shapes | dict.fromkeys(of_segments, shapes['ids'])

  def state(self) -> JsonObject:
    return {}  # the number of the batch says all

  def restore(self, state: JsonObject) -> None:
    pass

  def callbacks(self) -> list[Callback]:
    return [] if self.engine_check is None else [EngineAlarm(self.engine_check)]

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
    if gathered_in_turn(np.array([is_whole], np.int32)).all():
      return arrays
    if jax.process_index() == 0:
      log.warning(
        'The answers of the interrupted batch are not in the run folder: new ones are generated '
        'from the checkpoint, so the run will not equal an uninterrupted one bit for bit'
      )
    return None

  def _made(self, params: PyTree, number: int) -> Batch:
    """Returns all rows of a new rollout."""
    answered = self._answered(params, number)
    if self.run_files is not None and self.run_files.writes and self._kept_episodes:
      self._written(lambda: self._note(number, answered))
    arrays = self._arrays([self._row(one) for one in answered])
    if self.engine_check is not None:
      self.engine_check(params, number, arrays)
    return arrays

  @property
  def engine_check(self) -> EngineCheck | None:
    """Compares what the engine says of drawn tokens with the trainer."""
    return self._actor.check

  def _arrays(self, rows: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Returns the arrays [batches · B, T] of the rows of all episodes."""
    if self._packing is None:
      return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    batches = [
      self._packing.batch(some, [self._length(row) for row in some], self._of_places)
      for some in itertools.batched(rows, self.batch_size)
    ]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

  def _length(self, row: Batch) -> int:
    """Returns how many tokens of the row of an episode count: those up to the last target."""
    return int(np.flatnonzero(row['weights']).max(initial=-1)) + 1

  def _answered(self, params: PyTree, number: int) -> list[Answered]:
    """Returns the episodes of a rollout: an answer to each of the next prompts."""
    prompts = self._next_prompts(number)
    episodes = self._actor.play(params, prompts, None, self._seed_of(number))
    return [Answered(episode, {}) for episode in episodes]

  def _next_prompts(self, number: int) -> Sequence[Prompt]:
    """Returns the prompts of a rollout, one for each of its episodes."""
    size = self.batch_size * self._batches
    return self._drawn(number * size, size)

  def _seed_of(self, number: int) -> int:
    """Returns the seed of what is drawn for a rollout."""
    return (self._seed << 32) + number

  def _note(self, number: int, answered: Sequence[Answered]) -> None:
    """Writes the first episodes of each batch of a rollout to episodes.jsonl."""
    assert self.run_files is not None
    first = number * self._steps
    if self._episodes is None:
      self._episodes = EpisodeRecords(self.run_files.folder.parent)
      self._episodes.rewind(first, first)
    records = []
    for batch in range(self._batches):
      rows = answered[batch * self.batch_size :][: min(self._kept_episodes, self.batch_size)]
      at = [first + i for i in range(batch, self._steps, self._batches)]
      records += [_record(at, row, one) for row, one in enumerate(rows)]
    self._episodes.episodes(records)

  def _drawn(self, place: int, count: int) -> Sequence[Prompt]:
    """Returns prompts from a place on: all of them once, in an order of its own in each epoch."""
    epochs, indices = np.divmod(place + np.arange(count), len(self._prompts))
    for epoch in np.unique(epochs):
      of = epochs == epoch
      indices[of] = permute(indices[of], len(self._prompts), self._seed, int(epoch))
    return [self._prompts[int(i)] for i in indices]

  def _row(self, answered: Answered) -> Batch:
    """Returns the arrays [T] of an episode; the label of a token is the one after it."""
    return self._own_row(answered.episode)

  def _own_row(self, episode: Episode) -> Batch:
    """Returns those that the episode has by itself."""
    ids, T = episode.ids[: self.seq_len + 1], self.seq_len
    check = self.engine_check
    return {
      **({} if check is None else check.row(episode.scores, T)),
      'ids': padded(ids[:-1], T, np.int32),
      'labels': padded(ids[1:], T, np.int32),
      'weights': padded(episode.is_own[1 : T + 1], T, np.float32),
    }


def padded(values: Sequence[float], length: int, dtype: type[np.generic]) -> np.ndarray:
  """Returns values, and zeros up to a length."""
  return np.pad(np.asarray(values, dtype), (0, length - len(values)))


def _record(batches: Sequence[int], row: int, answered: Answered) -> JsonObject:
  """Returns what is kept of an episode.

  Args:
    batches: The numbers of the batches that it is trained in.
    row: Its row in them.
    answered: The episode.
  """
  episode = answered.episode
  prompt = episode.prompt
  return {
    'step': batches[0] + 1,
    'batches': list(batches),
    'row': row,
    'place': prompt.place,
    'prompt': list(prompt.messages) or prompt.record.get('prompt'),
    'answer': list(episode.messages),
    'is_cut': episode.is_cut,
    **answered.facts,
  }
