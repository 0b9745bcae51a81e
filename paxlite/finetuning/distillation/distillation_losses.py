"""Losses of distillation: a student is to predict the distributions that its teacher predicts.

The teacher is the reference model of the task: see finetuning/reference.py.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from paxlite.core.errors import UserError
from paxlite.finetuning.segment_sums import sums_at_ends
from paxlite.layers.language_model import LogitFactors
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs
from paxlite.losses.token_losses import target_sum

Kind = Literal['forward', 'reverse', 'jensen_shannon']

# arrays of a batch: the most likely tokens of the teacher [B, T, k], and their log-probabilities,
# followed by that of all other tokens together [B, T, k + 1]
TEACHER_IDS, TEACHER_LOG_PROBS = 'teacher_ids', 'teacher_log_probs'
_LEAST = -87.0  # the log-probability of no token; its exponential is about the smallest float32
_NONE = -1e30  # a logit without probability, which has a gradient, as minus infinity has not


def divergence(kind: Kind, student: jax.Array, teacher: jax.Array, beta: float = 0.5) -> jax.Array:
  """Returns a divergence of distributions over the last dimension, in nats.

  With p of the teacher, q of the student and m = β p + (1 − β) q it is

  - forward: KL(p ‖ q), which covers all that the teacher may say;
  - reverse: KL(q ‖ p), which keeps to what the teacher is likely to say;
  - jensen_shannon: β KL(p ‖ m) + (1 − β) KL(q ‖ m), https://arxiv.org/abs/2306.13649, equation 1.

  Args:
    kind: One of these.
    student: log q, [..., V].
    teacher: log p, [..., V].
    beta: β, between 0 and 1.
  """
  kl = lambda log_p, log_q: (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
  if kind == 'forward':
    return kl(teacher, student)
  if kind == 'reverse':
    return kl(student, teacher)
  # the factors 2 leave the sum of β = ½ as it is, to the last bit
  ours, theirs = student + math.log(2 * (1 - beta)), teacher + math.log(2 * beta)
  mixture = jnp.logaddexp(theirs, ours) - math.log(2)
  return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@dataclasses.dataclass(frozen=True)
class DistillationLoss(Loss):
  """A divergence of the teacher's and the student's distributions, the mean over the targets.

  Both are made softer by a temperature τ, which divides the logits. The divergence is multiplied by
  τ², so that the size of its gradient does not depend on τ: https://arxiv.org/abs/1503.02531,
  section 2. Where one vocabulary has more ids than the other, to fill it up, these do not count.

  Attributes:
    kind: A divergence: see the function of that name.
    temperature: τ.
    num_chunks: Number of chunks of tokens. Each has its logits in memory, [B, T / chunks, V], which
      are computed again in the backward pass. 1: those of all tokens are kept.
    beta: β of the divergence.
    top_k: The most likely tokens of the teacher that are told apart. All others count as one, as in
      StoredDistillation. 0: all are.
  """

  kind: Kind = 'forward'
  temperature: float = 1.0
  num_chunks: int = 1
  beta: float = 0.5
  top_k: int = 0

  label = 'divergence'
  larger_is_better = ('teacher_agreement',)
  shown = {'teacher_agreement': 'agreement {:.3f}'}

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    each_BT, _ = self._of_tokens(outputs)
    return target_sum(each_BT, batch)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    """Returns the share of targets where both models have the same most likely token."""
    _, agrees_BT = self._of_tokens(outputs)
    return {'teacher_agreement': Weighted.mean(target_sum(agrees_BT, batch), self.weight(batch))}

  def _of_tokens(self, outputs: Outputs) -> tuple[jax.Array, jax.Array]:
    """Returns the divergence of each token, and whether the most likely token is the same."""
    return outputs.once(self, functools.partial(self._compute, outputs))

  def _compute(self, outputs: Outputs) -> tuple[jax.Array, jax.Array]:
    if not outputs.has_reference:
      raise UserError('a student needs a teacher: TEACHER=FOLDER names its weights, or its run')
    student, teacher = outputs.logit_factors, outputs.reference.logit_factors
    size = min(student.vocab_size, teacher.vocab_size)
    student, teacher = student.of_first(size), teacher.of_first(size)
    if self.num_chunks == 1:
      return self._compare(student, teacher)
    chunks = functools.partial(_in_chunks, self.num_chunks)
    tokens = chunks(student.x_BTD), chunks(teacher.x_BTD)

    @jax.checkpoint
    def compare(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      of_student, of_teacher = chunk
      return self._compare(student._replace(x_BTD=of_student), teacher._replace(x_BTD=of_teacher))

    return _joined(jax.lax.map(compare, tokens))

  def _compare(self, student: LogitFactors, teacher: LogitFactors) -> tuple[jax.Array, jax.Array]:
    ours, theirs = student.logits() / self.temperature, teacher.logits() / self.temperature
    if self.top_k:
      _, ids_BTK = jax.lax.top_k(theirs, self.top_k)
      logs = of_tokens(ours, ids_BTK), of_tokens(theirs, ids_BTK)
    else:
      logs = jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs)
    each_BT = divergence(self.kind, *logs, self.beta)
    return each_BT * self.temperature**2, ours.argmax(-1) == theirs.argmax(-1)


def most_likely(
  factors: LogitFactors, count: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
  """Returns the ids [B, T, k] of the most likely tokens, and what `of_tokens` returns of them.

  Args:
    factors: What the logits are computed from.
    count: k.
    temperature: Divides the logits.
  """
  logits = factors.logits() / temperature
  _, ids = jax.lax.top_k(logits, count)
  return ids, of_tokens(logits, ids)


def of_tokens(logits: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns log-probabilities [..., k + 1]: of tokens, and of all others together.

  That of the others is summed up from their logits. One minus the others would lose all digits
  where little is left.

  Args:
    logits: Logits [..., V].
    ids: Ids of different tokens [..., k].
  """
  total = jax.nn.logsumexp(logits, -1, keepdims=True)
  others = jnp.put_along_axis(logits, ids, _NONE, -1, inplace=False)
  rest = jax.nn.logsumexp(others, -1, keepdims=True) - total
  kept = jnp.take_along_axis(logits, ids, -1) - total
  return jnp.concatenate([kept, jnp.maximum(rest, _LEAST)], -1)


@dataclasses.dataclass(frozen=True)
class AnswersDivergence(DistillationLoss):
  """The divergence of answers that the student wrote, whose lengths tell how it learns."""

  followed = {'teacher_agreement': 'agreement {:.3f}', 'answer_tokens': 'tokens {:.0f}'}

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    return {**super().metrics(outputs, batch), 'answer_tokens': answer_tokens(batch)}


def answer_tokens(batch: Batch) -> Weighted:
  """Returns the mean number of tokens of an answer."""
  answers = (sums_at_ends(batch['weights'], batch['segment_ids']) > 0).sum()
  return Weighted.mean(batch['weights'].sum(), answers.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class StoredDistillation(Loss):
  """Distillation from the most likely tokens of a teacher, which were stored before training.

  All other tokens count as one, whose probability is what is left. So the divergence is at most
  that of the whole distributions, and equals it where k is the size of the vocabulary.

  Attributes:
    kind, temperature, num_chunks, beta: See DistillationLoss; the stored values have this
      temperature.
    vocab_size: The ids that both models have; those behind them do not count.
  """

  kind: Kind = 'forward'
  temperature: float = 1.0
  num_chunks: int = 1
  beta: float = 0.5
  vocab_size: int = 0

  label = DistillationLoss.label
  larger_is_better = DistillationLoss.larger_is_better
  shown = DistillationLoss.shown

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return target_sum(self._of_tokens(outputs, batch)[0], batch)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    agrees_BT = self._of_tokens(outputs, batch)[1]
    return {'teacher_agreement': Weighted.mean(target_sum(agrees_BT, batch), self.weight(batch))}

  def _of_tokens(self, outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return outputs.once(self, lambda: self._compute(outputs, batch))

  def _compute(self, outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    student = outputs.logit_factors.of_first(self.vocab_size)
    tokens = student.x_BTD, batch[TEACHER_IDS], batch[TEACHER_LOG_PROBS]

    @jax.checkpoint
    def compare(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      x_BTD, ids_BTK, teacher_BTK = chunk
      ours = student._replace(x_BTD=x_BTD).logits() / self.temperature
      each = divergence(self.kind, of_tokens(ours, ids_BTK), teacher_BTK, self.beta)
      return each * self.temperature**2, ours.argmax(-1) == ids_BTK[..., 0]

    if self.num_chunks == 1:
      return compare(tokens)
    return _joined(jax.lax.map(compare, jax.tree.map(self._chunks, tokens)))

  def _chunks(self, x: jax.Array) -> jax.Array:
    return _in_chunks(self.num_chunks, x)


@dataclasses.dataclass(frozen=True)
class StoredAnswersDivergence(StoredDistillation):
  """The same of answers that the student wrote."""

  followed = AnswersDivergence.followed

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    return {**super().metrics(outputs, batch), 'answer_tokens': answer_tokens(batch)}


def _joined(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
  """Returns what chunks of tokens have, [C, B, T / C], as [B, T]."""
  one = lambda x_CBt: jnp.moveaxis(x_CBt, 0, 2).reshape(x_CBt.shape[1], -1)
  return one(found[0]), one(found[1])


def _in_chunks(num_chunks: int, x_BTD: jax.Array) -> jax.Array:
  """Returns [C, B, T / C, D]. A chunk has every C-th token, so that the length may be sharded."""
  B, T, D = x_BTD.shape
  return jnp.moveaxis(x_BTD.reshape(B, T // num_chunks, num_chunks, D), 2, 0)
