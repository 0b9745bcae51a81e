"""On-policy distillation: a student answers prompts, and a teacher says how it would go on.

    class Student(OnPolicyDistillation, SmolLM135M):
      MAX_NEW_TOKENS = 64

paxlite train students.Student TEACHER=runs/teacher TRAIN_FILES=prompts.jsonl
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import cast

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from paxlite.chats.chat_encoding import Encoded
from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import Pair, format_of
from paxlite.config.attribute_kinds import Fraction, Run, Training
from paxlite.config.templates import config
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch as HostBatch
from paxlite.data.base import RowArray
from paxlite.data.record_files import Record
from paxlite.data.text import Split
from paxlite.files import paths
from paxlite.finetuning.chats.example_reader import answers_of
from paxlite.finetuning.distillation import distillation_losses
from paxlite.finetuning.distillation.distillation_losses import TEACHER_IDS, TEACHER_LOG_PROBS
from paxlite.finetuning.distillation.experiment import Taught, teacher_model
from paxlite.finetuning.distillation.sampled_divergence import (
  TEACHER_LABEL,
  Estimate,
  Gradient,
  SampledDivergence,
)
from paxlite.finetuning.distillation.teachers import Teachers
from paxlite.finetuning.reference import Reference
from paxlite.finetuning.reinforcement import kept_rollouts
from paxlite.finetuning.reinforcement.answer_rollouts import (
  Answered,
  AnswerRollouts,
  RolloutOptions,
  padded,
)
from paxlite.finetuning.reinforcement.datasets import AnsweredPrompts
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.prompts import Prompt, PromptReader
from paxlite.finetuning.reinforcement.rollout_devices import Generation
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.sown import SOWN
from paxlite.losses.metrics import Batch
from paxlite.losses.outputs import Outputs

_PROMPT = 'teacher_prompt'  # the key of what the teacher reads in place of the prompt
# arrays of a batch [B, T]: what the teacher reads, and where its distributions of the labels are
_HINTED_IDS, _HINTED_AT = 'hinted_ids', 'hinted_at'
_TEACHER = 'teacher'  # the number of the teacher [B, T], before it has computed its values
_MIXING = 0x6D6978  # tells the draws of a mixture from those of tokens


class GivenReader(PromptReader):
  """Reads prompts whose records have an answer too."""

  def check(self, record: Record) -> None:
    super().check(record)
    if not self.given(record)[1].is_learned[1:].any():
      raise UserError('it has no answer, and STUDENT_SHARE is below 1')

  def given(self, record: Record) -> tuple[Pair | Conversation, Encoded]:
    """Returns a prompt with its last answer, and their ids."""
    fields = Fields(record)
    last = answers_of(format_of(fields).read(fields))[-1]
    encoding = self.encoding
    return last, encoding.pair(*last) if isinstance(last, Pair) else encoding.chat(last)


class HintedReader(PromptReader):
  """Reads prompts whose records have another one for the teacher."""

  def check(self, record: Record) -> None:
    super().check(record)
    self.hinted(record)

  def hinted(self, record: Record) -> list[int]:
    """Returns the ids of the teacher's prompt."""
    if not record.get(_PROMPT):
      raise UserError(f'it has no {_PROMPT!r}, a text or messages, and TEACHER_PROMPTS=True')
    own = {k: v for k, v in record.items() if k not in ('prompt', 'messages')}
    return self.ids({**own, 'prompt': record[_PROMPT]})


class GivenHintedReader(GivenReader, HintedReader):
  """Reads prompts whose records have both."""


_READERS: Mapping[tuple[bool, bool], type[PromptReader]] = {
  (False, False): PromptReader,
  (True, False): GivenReader,
  (False, True): HintedReader,
  (True, True): GivenHintedReader,
}


class TaughtRollouts(AnswerRollouts):
  """Answers of the student, mixed with given ones.

  Args:
    options: What all rollouts are made with.
    student_share: The probability that the student answers a prompt (λ of
      https://arxiv.org/abs/2306.13649, algorithm 1, for each sequence). Others have the answers of
      their records.
    teachers: Several teachers, which compute their values before a step; None: the step computes
      the one teacher.
    ahead: How many rollouts are made before the one that is trained on.
    beside: Whether they are made while training goes on, because the actor has its own devices.
  """

  def __init__(
    self,
    options: RolloutOptions,
    student_share: float = 1.0,
    teachers: Teachers | None = None,
    ahead: int = 0,
    beside: bool = False,
  ):
    super().__init__(options)
    self._share, self._teachers = student_share, teachers
    self._generation = Generation[HostBatch](ahead, beside) if ahead else None
    if self._generation is not None:
      self._actor.before_step = self._generation.check
    self._num_kept = 0  # rollouts that files have from before a restart
    if teachers is not None:
      for number in range(len(self._prompts)):
        prompt = self._prompts[number]
        with located(prompt.place):
          teachers.number(prompt.record)

  def state(self) -> JsonObject:
    state = {'teachers': self._teachers.fingerprints} if self._teachers else super().state()
    if self._generation is not None:
      state = {**state, 'next': max(self._num_kept, self._generation.finished()[1])}
    return state

  def wait(self, state: JsonObject) -> None:
    if self._generation is not None:
      self._generation.wait(cast(int, state['next']))

  def restore(self, state: JsonObject) -> None:
    super().restore(state)
    self._num_kept = int(cast(int, state.get('next', 0)))
    found = {} if self._teachers is None else self._teachers.fingerprints
    before = cast(JsonObject, state.get('teachers', {}))
    if other := [name for name in {**before, **found} if before.get(name) != found.get(name)]:
      raise UserError(
        f'TEACHERS: the weights of {", ".join(other)} are not those that the run began with: name '
        'the same teachers, or choose another folder for the run'
      )

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().shapes()
    is_hinted = isinstance(self._prompts.reader, HintedReader)
    shapes |= dict.fromkeys([_HINTED_IDS, _HINTED_AT] if is_hinted else [], shapes['ids'])
    return shapes if self._teachers is None else shapes | self._teachers.shapes(shapes['ids'])

  def close(self) -> None:
    if self._generation is not None:
      self._generation.close()

  def _rollout(self, params: PyTree, number: int, step: int) -> HostBatch:
    if step or self._generation is None:
      return super()._rollout(params, number, step)
    self._current = number, self._made(params, number)  # its file is there already
    return self._current[1]

  def _made(self, params: PyTree, number: int) -> HostBatch:
    if self._generation is None:
      return self._taught(params, number)
    start = time.perf_counter()
    arrays = self._generation.draw(number, self._kept, lambda: self._actor.placed(params))
    self.measured = self._generation.measured(start)
    return arrays

  def _kept(self, number: int, params: PyTree) -> HostBatch:
    """Returns a rollout from its file, or makes it and writes the file."""
    arrays = self._found(number) if number < self._num_kept else None
    if arrays is None:
      arrays = made = self._taught(params, number)
      if (files := self.run_files) is not None:
        self._written(lambda: kept_rollouts.write(files, number, made, self._steps))
    return arrays

  def _taught(self, params: PyTree, number: int) -> HostBatch:
    arrays = dict(super()._made(params, number))
    if self._teachers is not None:
      arrays |= self._teachers(arrays.pop(_TEACHER), arrays)
    return arrays

  def _answered(self, params: PyTree, number: int) -> list[Answered]:
    if self._share == 1:
      return super()._answered(params, number)
    prompts = self._next_prompts(number)
    draws = np.random.default_rng([self._seed, number, _MIXING]).random(len(prompts))
    is_own = draws < self._share
    asked = [prompt for prompt, own in zip(prompts, is_own, strict=True) if own]
    episodes = iter(self._actor.play(params, asked, None, self._seed_of(number)))
    return [
      Answered(next(episodes) if own else self._given(prompt), {'is_given': not own})
      for prompt, own in zip(prompts, is_own, strict=True)
    ]

  def _given(self, prompt: Prompt) -> Episode:
    reader = self._prompts.reader
    assert isinstance(reader, GivenReader)
    contents, encoded = reader.given(prompt.record)
    said = contents.targets if isinstance(contents, Pair) else contents.messages[-1]
    message = {'role': 'assistant', 'content': said} if isinstance(said, str) else said
    return Episode(prompt, encoded.ids.tolist(), encoded.is_learned.tolist(), [message], True)

  _of_places = (_HINTED_AT,)

  def _length(self, row: HostBatch) -> int:
    return max(super()._length(row), int(row.get(_HINTED_AT, np.zeros(1)).max()) + 1)

  def _row(self, answered: Answered) -> HostBatch:
    row, T = super()._row(answered), self.seq_len
    reader, episode = self._prompts.reader, answered.episode
    if self._teachers is not None:
      teacher = self._teachers.number(episode.prompt.record)
      row = {**row, _TEACHER: np.full(T, teacher, np.int32)}
    if not isinstance(reader, HintedReader):
      return row
    hinted, begin = reader.hinted(episode.prompt.record), episode.is_own.index(True)
    at = np.arange(T, dtype=np.int32) + len(hinted) - begin
    weights = row['weights'] * (at < T)  # a given answer may be too long for the teacher
    ids = [*hinted, *episode.ids[begin:]][:T]
    at = np.where(weights > 0, at, 0).astype(np.int32)
    return row | {'weights': weights, _HINTED_IDS: padded(ids, T, np.int32), _HINTED_AT: at}


class _HintedOutputs(Outputs):
  """Outputs of a teacher that reads another prompt, at the places of the student's answer."""

  def __init__(self, model: TransformerLm, batch: Batch, at_BT: jax.Array):
    super().__init__(model, batch)
    self._at_BT = at_BT

  @functools.cached_property
  def hidden(self) -> jax.Array:
    return jnp.take_along_axis(super().hidden, self._at_BT[..., None], 1)


@dataclasses.dataclass(frozen=True)
class HintedReference(Reference):
  """A teacher that reads another prompt than the student.

  Attributes:
    packed: Whether rows hold several answers, each with its hint in the same place.
  """

  packed: bool = False

  def outputs(self, params: PyTree, batch: Batch) -> Outputs:
    model = self.model.bind({'params': self.params_of(params)}, mutable=SOWN)
    # no token depends on the padding after it, which needs no segment of its own
    read = {k: batch[k] for k in (('segment_ids', 'segment_pos') if self.packed else ())}
    return _HintedOutputs(model, {'ids': batch[_HINTED_IDS], **read}, batch[_HINTED_AT])


class OnPolicyDistillation(Taught, AnsweredPrompts, subject='Reinforcement learning'):
  """Prompts in TRAIN_FILES, which the student answers; it learns what the TEACHER would say.

  With USE_LORA and no TEACHER, the weights without the factors are the teacher.
  """

  DIVERGENCE = 'reverse'
  STUDENT_SHARE: Training[Fraction] = (
    1.0  # share of sequences that the student writes (λ of GKD); the rest: answers of the records
  )
  TEACHER_PROMPTS: Training[bool] = False  # gives the teacher each record's teacher_prompt
  TEACHERS: Run[list[str]] = []  # NAME=FOLDER each: teachers of the records that name them
  TEACHER_KEY: Training[str] = 'task'  # key of a record that names its teacher, with TEACHERS
  SAMPLED_DIVERGENCE: Training[Estimate] = (
    'none'  # estimate of the reverse divergence at the drawn tokens alone, as in verl
  )
  ESTIMATE_GRADIENT: Training[Gradient] = (
    'policy'  # gradient of SAMPLED_DIVERGENCE; policy: the estimate is a negative reward
  )

  @property
  def teachers(self) -> dict[str, str]:
    """The folders of TEACHERS by their names."""
    pairs = [text.partition('=') for text in self.TEACHERS]
    if bad := [text for text, pair in zip(self.TEACHERS, pairs, strict=True) if not all(pair)]:
      raise UserError(f'TEACHERS: {bad[0]!r} is not NAME=FOLDER')
    if len({name for name, _, _ in pairs}) < len(pairs):
      raise UserError(f'TEACHERS={self.TEACHERS} has a name twice')
    return {name: paths.stored(folder) for name, _, folder in pairs}

  @property
  def paths_of_weights(self) -> list[str]:
    return [*super().paths_of_weights, *self.teachers.values()]

  @property
  def is_sampled(self) -> bool:
    """Whether the divergence is estimated at the drawn tokens alone."""
    return self.SAMPLED_DIVERGENCE != 'none'

  def validate(self) -> None:
    super().validate()
    if self.teachers and self.TEACHER:
      raise UserError('TEACHER and TEACHERS are both set: leave one of them out')
    if self.teachers and not self.TEACHER_TOP_K and not self.is_sampled:
      raise UserError(
        'TEACHERS compute their values before a step, which would be too many for whole '
        'distributions: set TEACHER_TOP_K=64 or SAMPLED_DIVERGENCE'
      )
    if not self.is_sampled:
      if self.ESTIMATE_GRADIENT != OnPolicyDistillation.ESTIMATE_GRADIENT:
        raise UserError(
          f'ESTIMATE_GRADIENT={self.ESTIMATE_GRADIENT} has no effect without SAMPLED_DIVERGENCE'
        )
      return
    kind = f'SAMPLED_DIVERGENCE={self.SAMPLED_DIVERGENCE}'
    needed = {'DIVERGENCE': 'reverse', 'TEACHER_TOP_K': 0, 'TEACHER_TEMPERATURE': 1.0}
    for name, value in {**needed, 'STUDENT_SHARE': 1.0}.items():
      if (found := getattr(self, name)) != value:
        raise UserError(
          f'{name}={found}: {kind} estimates the reverse divergence at tokens that the student has '
          f'drawn: {name}={value}'
        )
    is_old = self.steps_per_rollout > 1 or self.is_off_policy
    if self.ESTIMATE_GRADIENT == 'policy' and is_old:
      raise UserError(
        f'{kind} with ESTIMATE_GRADIENT=policy needs tokens of the current parameters: '
        'UPDATES_PER_BATCH=1 BATCHES_PER_ROLLOUT=1 MAX_STALENESS=0'
      )
    if self.ESTIMATE_GRADIENT == 'direct' and self.SAMPLED_DIVERGENCE == 'k1':
      raise UserError(
        f'{kind}: the mean of its direct gradient is 0: ESTIMATE_GRADIENT=policy, or k2 or k3'
      )

  @property
  def dataset(self) -> str:
    return 'prompts with a teacher'

  @property
  def has_teacher(self) -> bool:
    return super().has_teacher or self.USE_LORA or bool(self.TEACHERS)

  @property
  def warnings(self) -> list[str]:
    found = list(super().warnings)
    is_base = self.USE_LORA and not self.TEACHER and not self.TEACHERS
    if is_base and not self.TEACHER_PROMPTS:
      found.append(
        'The teacher is the base of the factors, and equal to new ones: with TEACHER_PROMPTS=True '
        'it reads a hint, and TEACHER=FOLDER names another one.'
      )
    return found

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    names = [_HINTED_IDS, _HINTED_AT] if self.TEACHER_PROMPTS else []
    found = {**dict.fromkeys(names, RowArray('int32')), **super().further_arrays}
    if self.TEACHERS:
      k = self.TEACHER_TOP_K
      log_probs = {TEACHER_LOG_PROBS: RowArray('float32', (k + 1,))}
      found[TEACHER_IDS] = RowArray('int32', (max(1, k),))
      found |= log_probs if k else {TEACHER_LABEL: RowArray('float32')}
    return found

  def losses(self) -> dict[str, fdl.Config]:
    if self.is_sampled:
      loss = config(
        SampledDivergence,
        kind=self.SAMPLED_DIVERGENCE,
        gradient=self.ESTIMATE_GRADIENT,
        temperature=self.ROLLOUT_TEMPERATURE,
        num_chunks=self.NUM_LOSS_CHUNKS,
        vocab_size=self._common_tokens,
      )
    else:
      loss = self.divergence(distillation_losses.AnswersDivergence)
      if self.TEACHERS:
        del loss.top_k
        fdl.update_callable(loss, distillation_losses.StoredAnswersDivergence)
        loss.vocab_size = self._common_tokens
    return {'divergence': loss, **super().losses()}

  @property
  def _common_tokens(self) -> int:
    of = lambda path: self.facts_of(path).values.get('VOCAB_SIZE')
    sizes = [size for path in self.teachers.values() if isinstance(size := of(path), int)]
    return min([super()._common_tokens, *sizes])

  def reference(self) -> fdl.Config | None:
    if self.TEACHERS:
      return None  # rollouts have them
    is_base = self.USE_LORA and not self.TEACHER
    found = self.initial_reference() if is_base else super().reference()
    if found is not None and self.TEACHER_PROMPTS:
      fdl.update_callable(found, HintedReference)
      found.packed = self.PACKED_INPUT
    return found

  def _source(self, files: list[str], split: Split) -> fdl.Config:
    source = super()._source(files, split)
    reader = _READERS[self.STUDENT_SHARE < 1, self.TEACHER_PROMPTS]
    if reader is not PromptReader:
      source.reader = reader
    return source

  def input(self, source: fdl.Config) -> fdl.Config:
    rollouts = super().input(source)
    fdl.update_callable(rollouts, TaughtRollouts)
    rollouts.student_share = self.STUDENT_SHARE
    rollouts.ahead = self.MAX_STALENESS // self.steps_per_rollout
    rollouts.beside = self.ROLLOUT_DEVICES > 0
    if self.teachers:
      rollouts.teachers = self._teachers(rollouts.options.actor.mesh)
    return rollouts

  def _teachers(self, mesh: fdl.Config) -> fdl.Config:
    kind = HintedReference if self.TEACHER_PROMPTS else Reference
    return config(
      Teachers,
      paths=self.teachers,
      references=[config(kind, model=teacher_model(self, p)) for p in self.teachers.values()],
      key=self.TEACHER_KEY,
      mesh=mesh,
      rules=self.rules,
      dtype=self.FROZEN_DTYPE,
      rows=self.batch_size // self.NUM_MICROBATCHES,
      vocab_size=self._common_tokens,
      temperature=self.ROLLOUT_TEMPERATURE if self.is_sampled else self.TEACHER_TEMPERATURE,
      top_k=self.TEACHER_TOP_K,
    )
