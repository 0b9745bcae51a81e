"""Distillation: a model learns from the distributions of a frozen teacher.

    class Student(Distillation, DemoGPT):
      NUM_LAYERS = 2

paxlite train students.Student TEACHER=runs/teacher
"""

from collections.abc import Mapping
from typing import Self

import fiddle as fdl
import jax

from paxlite.config import edits
from paxlite.config.attribute_kinds import (
  Fraction,
  Kind,
  NotNegative,
  OffAtZeroInt,
  Run,
  Training,
  names_of,
)
from paxlite.config.attributes import StoredPath, attribute_types
from paxlite.config.experiment_file import UNKNOWN
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.base import RowArray
from paxlite.experiments.identity import stated_values
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import class_of
from paxlite.finetuning.distillation import distillation_losses
from paxlite.finetuning.distillation.distillation_losses import TEACHER_IDS, TEACHER_LOG_PROBS
from paxlite.finetuning.reference import Reference
from paxlite.finetuning.stored_values import StoredValues
from paxlite.losses.outputs import Outputs

# What a teacher has in common with the run of its student.
_OF_THE_RUN = (
  'MESH_AXES',
  'ICI_MESH_SHAPE',
  'DCN_MESH_SHAPE',
  'PERCORE_BATCH_SIZE',
  'NUM_MICROBATCHES',
  'MAX_SEQ_LEN',
  'FPROP_DTYPE',
  'CONTEXT_ATTENTION',
  'USE_FLASH_ATTENTION',
  'MAX_SEGMENTS_PER_SEQ',
  'NUM_LOSS_CHUNKS',
)


def teacher_model(student: LanguageModel, path: str) -> fdl.Config:
  """Returns the config of a teacher's model, computed in plain XLA on the mesh of its student.

  Args:
    student: The experiment of the student.
    path: The weights of the teacher.

  Raises:
    UserError: The files beside the weights do not say what model they are of, or it has fewer
      positions, or a vocabulary of another size whose tokens are not known.
  """
  facts = student.facts_of(path)
  if not facts.experiment:
    raise UserError(f'TEACHER={path}: {facts.problem or "its experiment.json is missing"}')
  try:
    cls = class_of({'experiment': facts.experiment, 'values': facts.values})
  except UserError as e:
    if '--import' not in str(e):
      raise
    raise UserError(
      f'TEACHER={path} is a {facts.experiment}, but its module is not imported: import it in the '
      "student's module"
    ) from None
  if not issubclass(cls, LanguageModel):
    raise UserError(f'TEACHER={path}: {facts.experiment} is not a language model')
  if facts.values.get('USE_LORA'):
    raise UserError(
      f'TEACHER={path} holds low-rank factors and other weights: merge them with paxlite export '
      'and paxlite import, and name the result'
    )
  decide_model = {*names_of(attribute_types(cls), Kind.SHAPE, Kind.FUNCTION), 'HEADS_SPAN_MODEL'}
  decide_model.add(edits.EDITS)
  values = {k: v for k, v in stated_values(cls, facts.values).items() if k in decide_model}
  of_run = {name: getattr(student, name) for name in _OF_THE_RUN}
  positions = facts.values.get('MAX_POSITION_EMBEDDINGS', student.MAX_SEQ_LEN)
  teacher = cls(**(values | of_run | {'MAX_POSITION_EMBEDDINGS': positions}))
  if teacher.VOCAB_SIZE != student.VOCAB_SIZE and not facts.tokenizer:
    raise UserError(
      f'TEACHER={path} has VOCAB_SIZE={teacher.VOCAB_SIZE}, and the student has '
      f'{student.VOCAB_SIZE}; the teacher has no tokenizer that shows whether their tokens are '
      'the same'
    )
  if teacher.has_position_table and teacher.MAX_POSITION_EMBEDDINGS < student.MAX_SEQ_LEN:
    raise UserError(
      f'TEACHER={path} has {teacher.MAX_POSITION_EMBEDDINGS} positions, but MAX_SEQ_LEN is '
      f'{student.MAX_SEQ_LEN}'
    )
  return edits.edited(teacher.plain.task(), teacher.CONFIG_EDITS).model


class Taught(LanguageModel, subject='Losses'):
  """A student that learns from the distributions of a TEACHER: see distillation_losses.py."""

  TEACHER: Run[StoredPath] = ''  # teacher's weights, imported or from a run
  DIVERGENCE: Training[distillation_losses.Kind] = (
    'forward'  # divergence of student and teacher; forward: KL(teacher ‖ student)
  )
  DIVERGENCE_BETA: Training[Fraction] = 0.5  # teacher's share in the mixture of jensen_shannon
  TEACHER_TEMPERATURE: Training[NotNegative] = (
    1.0  # divisor of the teacher's and the student's logits
  )
  TEACHER_TOP_K: Training[OffAtZeroInt] = (
    0  # teacher's tokens told apart, the others as one; on given answers stored first; 0: all
  )

  @property
  def REFERENCE_RESTORE_PATH(self) -> Run[StoredPath]:
    """Weights of the frozen reference model, which is the teacher."""
    return self.TEACHER

  @property
  def paths_of_weights(self) -> list[str]:
    return super().paths_of_weights + ([self.TEACHER] if self.TEACHER else [])

  @property
  def has_teacher(self) -> bool:
    """Whether a teacher is named."""
    return bool(self.TEACHER)

  @property
  def _common_tokens(self) -> int:
    """The size of the smaller vocabulary; the rest of the larger one fills it up."""
    theirs = self.facts_of(self.TEACHER).values.get('VOCAB_SIZE')
    return min(self.VOCAB_SIZE, theirs) if isinstance(theirs, int) else self.VOCAB_SIZE

  def validate(self) -> None:
    super().validate()
    if not self.TEACHER_TEMPERATURE:
      raise UserError('TEACHER_TEMPERATURE=0: nothing would be learned from the teacher')
    if (most := self._common_tokens) < self.TEACHER_TOP_K:
      of = '' if most == self.VOCAB_SIZE else ' of the teacher'
      raise UserError(f'TEACHER_TOP_K={self.TEACHER_TOP_K} must be at most VOCAB_SIZE={most}{of}')
    beta = self.DIVERGENCE_BETA
    if self.DIVERGENCE == 'jensen_shannon' and beta in (0, 1):
      way_out = 'reverse' if beta else 'forward'
      raise UserError(f'DIVERGENCE_BETA={beta:g} is the limit DIVERGENCE={way_out}: name that')
    if self.DIVERGENCE != 'jensen_shannon' and beta != Taught.DIVERGENCE_BETA:
      raise UserError(
        f'DIVERGENCE_BETA={beta:g} has no effect with DIVERGENCE={self.DIVERGENCE}: '
        'DIVERGENCE=jensen_shannon has a mixture'
      )
    if self.REFERENCE_RESTORE_PATH != self.TEACHER:
      raise UserError(
        f'REFERENCE_RESTORE_PATH={self.REFERENCE_RESTORE_PATH} and TEACHER={self.TEACHER} both '
        "name the teacher's weights: leave the former out"
      )

  def divergence(self, loss: type[distillation_losses.DistillationLoss]) -> fdl.Config:
    """Returns the config of a loss: the divergence from a teacher that each step computes."""
    return config(
      loss,
      kind=self.DIVERGENCE,
      temperature=self.TEACHER_TEMPERATURE,
      num_chunks=self.NUM_LOSS_CHUNKS,
      beta=self.DIVERGENCE_BETA,
      top_k=self.TEACHER_TOP_K,
    )

  def train_input(self) -> fdl.Config:
    if not self.has_teacher:
      raise UserError(
        'TEACHER=FOLDER is missing: the weights to learn from, as paxlite import writes them, or a '
        'run'
      )
    if self.MAX_SEQ_LEN % self.NUM_LOSS_CHUNKS:
      raise UserError(
        f'NUM_LOSS_CHUNKS={self.NUM_LOSS_CHUNKS} must divide MAX_SEQ_LEN={self.MAX_SEQ_LEN}: the '
        'divergence from a teacher is computed in chunks of tokens'
      )
    return super().train_input()

  def reference(self) -> fdl.Config | None:
    # train_input() asks for a teacher; what reads no weights, as to generate text, needs none
    if not self.TEACHER or self.facts_of(self.TEACHER) is UNKNOWN:
      return None
    return config(Reference, model=teacher_model(self, self.TEACHER))


class Distillation(StoredValues, Taught, subject='Losses'):
  """Adds a divergence from a teacher to the losses."""

  TEACHER_WEIGHT: Training[Fraction] = (
    0.5  # share of the divergence in the loss; the rest is cross-entropy
  )

  @property
  def reference_path(self) -> str:
    return '' if self.TEACHER_TOP_K else self.TEACHER

  @property
  def stored_arrays(self) -> Mapping[str, RowArray]:
    k = self.TEACHER_TOP_K
    if not k or not self.TEACHER:
      return {}
    return {TEACHER_IDS: RowArray('int32', (k,)), TEACHER_LOG_PROBS: RowArray('float32', (k + 1,))}

  @property
  def made_with(self) -> str:
    return f'{self.TEACHER_TEMPERATURE} {self._common_tokens}'

  def made_of(self, outputs: Outputs) -> Mapping[str, jax.Array]:
    factors = outputs.logit_factors.of_first(self._common_tokens)
    ids, log_probs = distillation_losses.most_likely(
      factors, self.TEACHER_TOP_K, self.TEACHER_TEMPERATURE
    )
    return {TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs}

  @property
  def with_reference(self) -> Self:
    return self.replaced(TEACHER_TOP_K=0)

  def validate(self) -> None:
    super().validate()
    if not self.TEACHER_WEIGHT:
      raise UserError('TEACHER_WEIGHT=0: nothing would be learned from the teacher')

  def losses(self) -> dict[str, fdl.Config]:
    losses, share = super().losses(), self.TEACHER_WEIGHT
    for name, loss in losses.items():
      if name.endswith('_xent'):
        loss.coefficient *= 1 - share
    divergence = self.divergence(distillation_losses.DistillationLoss)
    divergence.coefficient = share
    if self.stored_arrays:
      del divergence.top_k
      fdl.update_callable(divergence, distillation_losses.StoredDistillation)
      divergence.vocab_size = self._common_tokens
    return losses | {'divergence': divergence}

  def reference(self) -> fdl.Config | None:
    return None if self.TEACHER_TOP_K else super().reference()
