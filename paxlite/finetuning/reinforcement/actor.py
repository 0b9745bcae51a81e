"""The model that answers prompts, in one turn or in several."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.finetuning.reinforcement.engine_check import EngineCheck
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.prompts import Prompt
from paxlite.finetuning.reinforcement.rollout_devices import placed
from paxlite.generation.engine import Engine
from paxlite.generation.job import Job
from paxlite.generation.request import Completion, Request
from paxlite.generation.text import AnswerText
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import partitioning
from paxlite.processes.process_messages import broadcast

_MOST_ROWS = 128  # that are generated at a time
_MARK = 'an answer that no template changes'


class Actor:
  """Plays episodes.

  Args:
    encoding: Turns texts and conversations to ids, and says which tokens end an answer.
    model: The model that is trained.
    mesh, rules, max_length, sampling: See Engine.
    rows: The number of episodes that are played at a time.
    room: The most tokens of an episode.
    max_tokens: The most new tokens of an answer.
    max_turns: The most answers of an episode.
    max_seconds: An episode that has taken longer gets no further answer; 0: it may take any time.
    check: Compares what the engine says of tokens with the trainer; None: nothing is compared.
  """

  def __init__(
    self,
    encoding: ChatEncoding,
    model: TransformerLm,
    mesh: Mesh,
    rules: partitioning.Rules,
    max_length: int,
    sampling: Sampling,
    rows: int,
    room: int,
    max_tokens: int,
    max_turns: int = 1,
    max_seconds: float = 0.0,
    check: EngineCheck | None = None,
  ):
    tokenizer = encoding.tokenizer
    self.engine = Engine(
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
      tracks_experts=check is not None,
    )
    self.check, self._mesh = check, mesh
    self.before_step: Callable[[], None] = lambda: None  # of the engine in play, which it may end
    self._encoding, self._max_tokens, self._max_turns = encoding, max_tokens, max_turns
    self._room, self._max_seconds = min(room, max_length), max_seconds

  def placed(self, params: PyTree) -> PyTree:
    """Returns parameters on the mesh that generates: copies, if that is not the one that trains."""
    return placed(params, self._mesh)

  def play(
    self,
    params: PyTree,
    prompts: Sequence[Prompt],
    judges: Judges | None,
    seed: int,
    first: int = 0,
  ) -> list[Episode]:
    """Returns an episode for each prompt.

    Args:
      params: The parameters, which the engine forgets afterwards: the next step overwrites them.
      prompts: The prompts.
      judges: What replies; None where an episode has one answer.
      seed: Of what is drawn.
      first: The number of the first episode among those of this seed.
    """
    found, start = [Episode.of(prompt) for prompt in prompts], time.monotonic()
    self.engine.params = self.placed(params)
    try:
      for turn in range(self._max_turns):
        open_ = [i for i, episode in enumerate(found) if not episode.is_over]
        if not open_:
          break
        samples = [(first + i) * self._max_turns + turn for i in open_]
        asked = [self.request(found[i], seed, k) for i, k in zip(open_, samples, strict=True)]
        for i, answer in zip(open_, self._answers(asked), strict=True):
          self._said(found[i], answer)
        if judges is not None and turn + 1 < self._max_turns:
          self._replied([found[i] for i in open_ if not found[i].is_over], judges, start)
    finally:
      self.engine.params = None
    return found

  def _answers(self, asked: Sequence[Request]) -> list[Completion]:
    jobs = [self.engine.add(request) for request in asked]
    try:
      while any(job.answer is None for job in jobs):
        self.before_step()
        self.engine.step(while_reading=0)
    finally:
      for job in jobs:
        self.engine.cancel(job)
    for job in jobs:
      job.check()
    return [job.answer for job in jobs if job.answer is not None]

  def go_on(
    self,
    params: PyTree,
    episodes: Sequence[Episode],
    judges: Judges | None,
    seed: int,
    is_enough: Callable[[], bool],
  ) -> None:
    """Lets episodes go on until enough have ended; those that have not keep what they have.

    An episode takes the row of another as soon as that has ended, and does not wait for the turns
    of others.

    Args:
      params, judges, seed: See `play`.
      episodes: The episodes.
      is_enough: Says whether enough have ended.
    """
    jobs: dict[int, Job] = {}
    start = time.monotonic()  # what an episode took in earlier rollouts does not count
    self.engine.params = params
    try:
      while not is_enough():
        for i, episode in enumerate(episodes):
          if i not in jobs and not episode.is_over:
            turn = sum(m['role'] == 'assistant' for m in episode.messages)
            jobs[i] = self.engine.add(self.request(episode, seed, i * self._max_turns + turn))
        self.engine.step(while_reading=0)
        ended = {i: job.answer for i, job in jobs.items() if job.answer is not None}
        for i, answer in ended.items():
          jobs.pop(i).check()
          self._said(episodes[i], answer)
          turns = sum(m['role'] == 'assistant' for m in episodes[i].messages)
          episodes[i].is_over |= turns >= self._max_turns
        if judges is not None and (open_ := [i for i in ended if not episodes[i].is_over]):
          self._replied([episodes[i] for i in open_], judges, start)
    finally:
      for i, job in jobs.items():
        self.engine.cancel(job)
        if job.answer is not None:
          episodes[i].append(job.answer.ids, True, scores=job.answer.scores)
          episodes[i].num_open += len(job.answer.ids)
      self.engine.params = None

  def request(self, episode: Episode, seed: int, sample: int) -> Request:
    """Returns the engine request for the next answer of an episode, or for the rest of one."""
    room = min(self._max_tokens - episode.num_open, self._room - len(episode.ids))
    return Request(episode.ids, room, self.engine.sampling, seed, sample, ends=self.engine.ends)

  def _said(self, episode: Episode, answer: Completion) -> None:
    """Appends an answer with the token that ended it, which is learned too."""
    ids = [*answer.ids]
    if answer.finish == 'stop' and answer.end is not None:
      ids.append(answer.end)
    said = self._whole(episode, answer) if episode.num_open else answer.spelled
    message = {'role': 'assistant', 'content': said}
    episode.append(ids, True, message, scores=answer.scores[: len(ids)])
    episode.num_open = 0
    episode.is_cut = answer.finish == 'length'
    full = len(episode.ids) >= self._room
    episode.is_over = episode.is_cut or full or self._max_turns <= 1

  def _whole(self, episode: Episode, rest: Completion) -> str:
    """Returns the text of an answer that other parameters have begun."""
    start = len(episode.ids) - episode.num_open
    text = AnswerText(self._encoding.tokenizer, before=episode.ids[:start])
    for token in [*episode.ids[start:], *rest.ids]:
      text.add(token)
    text.close()
    return ''.join(text.parts)

  def _replied(self, episodes: Sequence[Episode], judges: Judges, start: float) -> None:
    """Appends what the environment replies to episodes that began at `start`, or ends them."""
    replies = judges.replies(episodes)
    is_late = False
    if self._max_seconds:  # by the clock of the first process
      is_late = bool(int(broadcast(b'%d' % (time.monotonic() - start > self._max_seconds))))
    for episode, messages in zip(episodes, replies, strict=True):
      new = self._after(episode, messages) if messages else []
      episode.is_cut = is_late and bool(messages)
      if not messages or is_late or len(episode.ids) + len(new) >= self._room - 1:
        episode.is_over = True
      else:
        episode.append(new, False, *messages)

  def _after(self, episode: Episode, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the ids between the end of an answer and the beginning of the next one."""
    before = [*episode.prompt.messages, *episode.messages]
    tools = episode.prompt.tools
    whole = self._encoding.chat_text([*before, *messages], True, tools)
    start = self._encoding.chat_text(before, False, tools)
    # the answer has the token that ended it already, and not what the template puts behind that
    end = self._encoding.tokenizer.decode_marked(episode.ids[-1:])
    if end in start:
      start = start[: start.rfind(end) + len(end)]
    if whole.startswith(start):
      return self._encoding.marked(whole[len(start) :])
    # the template leaves out the thinking of earlier answers, which the model has read: what
    # follows an answer without thinking follows this one
    turn = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': _MARK}]
    start, mark, rest = self._encoding.chat_text([*turn, *messages], True, tools).rpartition(_MARK)
    if not mark or end not in rest:
      raise UserError(
        'the chat template changes earlier messages when another follows, so a conversation '
        'cannot be continued token by token: choose another CHAT_TEMPLATE'
      )
    return self._encoding.marked(rest[rest.index(end) + len(end) :])
