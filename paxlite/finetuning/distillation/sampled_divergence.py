"""Estimates of the divergence from a teacher at the tokens that the student has drawn.

They need one log-probability of the teacher for each token in place of a distribution.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from paxlite.finetuning.distillation.distillation_losses import (
  TEACHER_IDS,
  AnswersDivergence,
  answer_tokens,
)
from paxlite.layers.language_model import LogitFactors
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs
from paxlite.losses.token_losses import target_sum

Estimate = Literal['none', 'k1', 'k2', 'k3']
Gradient = Literal['policy', 'direct']

TEACHER_LABEL = 'teacher_label_log_probs'  # the array [B, T] of a batch, if it was computed before
_MOST_LOG, _MOST = 20.0, 10.0  # verl's bounds: of the logarithm of a ratio, and of k3


def estimate(kind: Estimate, student: jax.Array, teacher: jax.Array) -> jax.Array:
  """Returns an estimate of KL(q ‖ p) in nats from log q and log p of tokens drawn from q.

  With d = log p − log q, k1 is −d, k2 is d² / 2 and k3 is exp(d) − d − 1
  (http://joschu.net/blog/kl-approx.html). k1 and k3 have the divergence as their mean. k3 is
  bounded as in verl, https://github.com/volcengine/verl, verl/trainer/ppo/core_algos.py.
  """
  d = teacher - student
  if kind == 'k1':
    return -d
  if kind == 'k2':
    return d**2 / 2
  d = jnp.clip(d, -_MOST_LOG, _MOST_LOG)
  return jnp.clip(jnp.exp(d) - d - 1, -_MOST, _MOST)


def label_log_probs(
  factors: LogitFactors, labels_BT: jax.Array, temperature: float, num_chunks: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability of each label, and the most likely token, both [B, T].

  Args:
    factors: What the logits are computed from.
    labels_BT: The tokens.
    temperature: Divides the logits.
    num_chunks: Number of chunks of tokens, each of which has its logits in memory.
  """

  @jax.checkpoint
  def of(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    x_BTD, labels_BT1 = chunk
    logs_BTV = jax.nn.log_softmax(factors._replace(x_BTD=x_BTD).logits() / temperature)
    return jnp.take_along_axis(logs_BTV, labels_BT1, -1)[..., 0], logs_BTV.argmax(-1)

  tokens = factors.x_BTD, labels_BT[..., None]
  if num_chunks == 1:
    return of(tokens)
  B, T = labels_BT.shape
  split = lambda x: jnp.moveaxis(x.reshape(B, T // num_chunks, num_chunks, -1), 2, 0)
  whole = lambda x_CBt: jnp.moveaxis(x_CBt, 0, 2).reshape(B, T)
  found = jax.lax.map(of, jax.tree.map(split, tokens))
  return whole(found[0]), whole(found[1])


@dataclasses.dataclass(frozen=True)
class SampledDivergence(Loss):
  """The mean estimate over the tokens that the student has drawn.

  The gradient `direct` differentiates the estimate for the given tokens. Its mean over drawn tokens
  is 0 for k1, the gradient of KL(q ‖ p) for k2, and the gradient of KL(p ‖ q) for k3. The gradient
  `policy` is k ∇ log q, as if −k were a reward. For k1 it equals the direct one of k2.

  Attributes:
    kind: See `estimate`.
    gradient: One of these.
    temperature: That of the sampling, which divides the logits of both models.
    num_chunks: See `label_log_probs`.
    vocab_size: The ids that both models have; 0: all.
  """

  kind: Estimate = 'k1'
  gradient: Gradient = 'policy'
  temperature: float = 1.0
  num_chunks: int = 1
  vocab_size: int = 0

  label = AnswersDivergence.label
  larger_is_better = AnswersDivergence.larger_is_better
  shown = AnswersDivergence.shown
  followed = AnswersDivergence.followed

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    student_BT, teacher_BT, _ = self._of_tokens(outputs, batch)
    each_BT = estimate(self.kind, student_BT, teacher_BT)
    if self.gradient == 'policy':
      each_BT = jax.lax.stop_gradient(each_BT)
      # the second term is 0 and has the gradient
      each_BT += each_BT * (student_BT - jax.lax.stop_gradient(student_BT))
    return target_sum(each_BT, batch)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    agrees = target_sum(self._of_tokens(outputs, batch)[2], batch)
    agreement = Weighted.mean(agrees, self.weight(batch))
    return {'teacher_agreement': agreement, 'answer_tokens': answer_tokens(batch)}

  def _of_tokens(self, outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns log q and log p of the labels, and whether the most likely token is the same."""
    return outputs.once(self, lambda: self._compute(outputs, batch))

  def _compute(self, outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    labels_BT, of = batch['labels'], (self.temperature, self.num_chunks)
    size = self.vocab_size or outputs.logit_factors.vocab_size
    student_BT, ours_BT = label_log_probs(outputs.logit_factors.of_first(size), labels_BT, *of)
    if TEACHER_LABEL in batch:
      return student_BT, batch[TEACHER_LABEL], ours_BT == batch[TEACHER_IDS][..., 0]
    factors = outputs.reference.logit_factors.of_first(size)
    teacher_BT, theirs_BT = label_log_probs(factors, labels_BT, *of)
    return student_BT, teacher_BT, ours_BT == theirs_BT
