"""Losses of distillation: a student is to predict the distributions that its teacher predicts.

The teacher is the reference model of the task: see training/reference.py.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from paxlite.core.errors import UserError
from paxlite.layers.language_model import LogitFactors
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs
from paxlite.losses.token_losses import target_sum

Kind = Literal['forward', 'reverse', 'jensen_shannon']


def divergence(kind: Kind, student: jax.Array, teacher: jax.Array) -> jax.Array:
  """Returns a divergence of distributions over the last dimension, in nats.

  With p of the teacher, q of the student and m = (p + q) / 2 it is

  - forward: KL(p ‖ q), which covers all that the teacher may say;
  - reverse: KL(q ‖ p), which keeps to what the teacher is likely to say;
  - jensen_shannon: (KL(p ‖ m) + KL(q ‖ m)) / 2, https://arxiv.org/abs/2306.13649, equation 1.

  Args:
    kind: One of these.
    student: log q, [..., V].
    teacher: log p, [..., V].
  """
  kl = lambda log_p, log_q: (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
  if kind == 'forward':
    return kl(teacher, student)
  if kind == 'reverse':
    return kl(student, teacher)
  mixture = jnp.logaddexp(teacher, student) - math.log(2)
  return (kl(teacher, mixture) + kl(student, mixture)) / 2


@dataclasses.dataclass(frozen=True)
class Distillation(Loss):
  """A divergence of the teacher's and the student's distributions, the mean over the targets.

  Both are made softer by a temperature τ, which divides the logits. The divergence is multiplied by
  τ², so that the size of its gradient does not depend on τ: https://arxiv.org/abs/1503.02531,
  section 2. Where one vocabulary has more ids than the other, to fill it up, these do not count.

  Attributes:
    kind: A divergence: see the function of that name.
    temperature: τ.
    num_chunks: Number of chunks of tokens. Each has its logits in memory, [B, T / chunks, V], which
      are computed again in the backward pass. 1: those of all tokens are kept.
  """

  kind: Kind = 'forward'
  temperature: float = 1.0
  num_chunks: int = 1

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

    joined = lambda x_CBt: jnp.moveaxis(x_CBt, 0, 2).reshape(*student.x_BTD.shape[:2])
    each, agrees = jax.lax.map(compare, tokens)
    return joined(each), joined(agrees)

  def _compare(self, student: LogitFactors, teacher: LogitFactors) -> tuple[jax.Array, jax.Array]:
    ours, theirs = student.logits() / self.temperature, teacher.logits() / self.temperature
    each_BT = divergence(self.kind, jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs))
    return each_BT * self.temperature**2, ours.argmax(-1) == theirs.argmax(-1)


def _in_chunks(num_chunks: int, x_BTD: jax.Array) -> jax.Array:
  """Returns [C, B, T / C, D]. A chunk has every C-th token, so that the length may be sharded."""
  B, T, D = x_BTD.shape
  return jnp.moveaxis(x_BTD.reshape(B, T // num_chunks, num_chunks, D), 2, 0)
