"""The loss of group-relative policy optimization (GRPO) and its kin, of answers with advantages.

A batch holds one episode a row, or several as segments (PackedPolicyLoss), as policy_rollouts.py
makes them: weights are 1 at
the tokens that the model wrote, and `advantages` [B, T] has there how much better the episode was
than others of its group. `rewards` [B, T] has the reward at the last of these tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from paxlite.finetuning import segment_sums
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs

Mean = Literal['grpo', 'dr_grpo', 'dapo']
Ratio = Literal['token', 'sequence']
# arrays of a batch: the log-probabilities before its first update, those of the policies that wrote
# the tokens, and the number of updates between both
OLD, BEHAVIOUR, STALENESS = 'old_log_probs', 'behaviour_log_probs', 'staleness'


_OF_OLDER = {
  'staleness': 'stale {:.1f}',
  'importance': 'ratio {:.3f}',
  'max_importance': 'at most {:.2f}',
  'wait_for_rollouts_seconds': 'waited {:.2f} s',
  'wait_for_training_seconds': 'idle {:.2f} s',
}


@dataclasses.dataclass(frozen=True)
class PolicyLoss(Loss):
  """−min(r·A, clip(r, 1 − low, 1 + high)·A) + β·KL of each token that the model wrote.

  r = π/π_old is the ratio of the probabilities now and when the tokens were drawn, which is 1 in
  the first update of a batch (https://arxiv.org/abs/1707.06347, equation 7). KL is the estimate
  π_ref/π − ln(π_ref/π) − 1 of the divergence from the reference (https://arxiv.org/abs/2402.03300,
  equation 4). The mean over tokens is

  - grpo: that of episodes, each the mean of its tokens (equation 3 there);
  - dr_grpo: the sum of an episode over a constant length (https://arxiv.org/abs/2503.20783);
  - dapo: that of all tokens of the batch (https://arxiv.org/abs/2503.14476, equation 8).

  A batch that is trained on once has no OLD, and r is 1. Where BEHAVIOUR says with which
  probabilities μ older parameters wrote the tokens, the first term is multiplied by
  min(π_old/μ, C): the decoupled objective (https://arxiv.org/abs/2110.00641,
  https://arxiv.org/abs/2505.24298), whose ratio is truncated as in V-trace
  (https://arxiv.org/abs/1802.01561) and TIS.

  Attributes:
    mean: One of these.
    ratio: token: r of each token; sequence: the geometric mean of r over an episode, for all of its
      tokens (GSPO, https://arxiv.org/abs/2507.18071, equation 7).
    clip_low: low.
    clip_high: high, which DAPO chooses larger than low.
    kl_weight: β; 0: there is no reference.
    length: The constant length of dr_grpo.
    temperature: That of the sampling: π is softmax(logits / temperature).
    most_importance: C; 0: the ratio is not truncated; None: the newest parameters wrote all tokens.
  """

  mean: Mean = 'grpo'
  ratio: Ratio = 'token'
  clip_low: float = 0.2
  clip_high: float = 0.2
  kl_weight: float = 0.0
  length: int = 1
  temperature: float = 1.0
  most_importance: float | None = None

  label = 'policy loss'
  larger_is_better = ('reward',)
  shown = {'reward': 'reward {:.3f}'}

  @property
  def followed(self) -> Mapping[str, str]:  # type: ignore[override]
    """Those of rewards; where older parameters write tokens, also how old they are, and waits."""
    found = {'reward': 'reward {:.3f}', 'answer_tokens': 'tokens {:.0f}'}
    return found if self.most_importance is None else found | _OF_OLDER

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    log_probs_BT, is_own_BT = self._log_probs(outputs, batch), batch['weights']
    advantages_BT = batch['advantages']
    ratio_BT = self._ratios(log_probs_BT, batch)
    clipped_BT = jnp.clip(ratio_BT, 1 - self.clip_low, 1 + self.clip_high)
    losses_BT = -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if BEHAVIOUR in batch:
      importance_BT = self._importance(log_probs_BT, batch)
      losses_BT *= jnp.minimum(importance_BT, self.most_importance or jnp.inf)
    if self.kl_weight:
      losses_BT += self.kl_weight * self._divergence(log_probs_BT, outputs, batch)
    sums = self._sums(losses_BT * is_own_BT, batch)
    if self.mean == 'dapo':
      return sums.sum()
    if self.mean == 'dr_grpo':
      return sums.sum() / self.length
    return (sums / jnp.maximum(self._sums(is_own_BT, batch), 1)).sum()

  def weight(self, batch: Batch) -> jax.Array:
    if self.mean == 'dapo':
      return batch['weights'].sum()
    return self._episodes(batch)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted | jax.Array]:
    """Returns means over episodes, and over the tokens that the model wrote."""
    log_probs_BT, is_own_BT = self._log_probs(outputs, batch), batch['weights']
    episodes, tokens = self._episodes(batch), is_own_BT.sum()
    of_episodes = lambda x: Weighted.mean(x.sum(), episodes)
    of_tokens = lambda x_BT: Weighted.mean((x_BT * is_own_BT).sum(), tokens)
    ratio_BT, advantages_BT = self._ratios(log_probs_BT, batch), batch['advantages']
    is_clipped_BT = ((ratio_BT < 1 - self.clip_low) & (advantages_BT < 0)) | (
      (ratio_BT > 1 + self.clip_high) & (advantages_BT > 0)
    )
    has_signal = self._sums(jnp.abs(advantages_BT) * is_own_BT, batch) > 0
    found: dict[str, Weighted | jax.Array] = {
      'reward': of_episodes(batch['rewards']),
      'answer_tokens': of_episodes(is_own_BT),
      'unlike_others': of_episodes(has_signal.astype(jnp.float32)),
      'clipped': of_tokens(is_clipped_BT.astype(jnp.float32)),
      'surprise': of_tokens(-log_probs_BT),
    }
    if BEHAVIOUR in batch:
      importance_BT = self._importance(log_probs_BT, batch)
      is_cut_BT = importance_BT > (self.most_importance or jnp.inf)
      found |= {
        'importance': of_tokens(importance_BT),
        'max_importance': Weighted((importance_BT * is_own_BT).max(), tokens),
        'truncated': of_tokens(is_cut_BT.astype(jnp.float32)),
        'staleness': of_tokens(batch[STALENESS]),
      }
    if outputs.has_reference:
      found['kl'] = of_tokens(self._divergence(log_probs_BT, outputs, batch))
    return found

  def _log_probs(self, outputs: Outputs, batch: Batch) -> jax.Array:
    if self.temperature == 1:
      return outputs.log_probs
    return outputs.once(
      'of_temperature', lambda: tempered(outputs, batch['labels'], self.temperature)
    )

  def _ratios(self, log_probs_BT: jax.Array, batch: Batch) -> jax.Array:
    old_BT = jax.lax.stop_gradient(batch.get(OLD, log_probs_BT))
    logs_BT = _of_own(log_probs_BT - old_BT, batch)
    if self.ratio == 'sequence':
      is_own_BT = batch['weights']
      count = jnp.maximum(self._totals(is_own_BT, batch), 1)
      logs_BT = jnp.broadcast_to(self._totals(logs_BT * is_own_BT, batch) / count, logs_BT.shape)
    return jnp.exp(logs_BT)

  def _importance(self, log_probs_BT: jax.Array, batch: Batch) -> jax.Array:
    """Returns π_old/μ of each token that the model wrote, without a gradient."""
    old_BT = jax.lax.stop_gradient(batch.get(OLD, log_probs_BT))
    return jnp.exp(_of_own(old_BT - batch[BEHAVIOUR], batch))

  def _sums(self, x_BT: jax.Array, batch: Batch) -> jax.Array:
    """Returns the sum of x over each episode, one number each; others are 0."""
    return x_BT.sum(1)

  def _totals(self, x_BT: jax.Array, batch: Batch) -> jax.Array:
    """Returns the sum of x over the episode of each token, [B, T] or [B, 1]."""
    return x_BT.sum(1, keepdims=True)

  def _episodes(self, batch: Batch) -> jax.Array:
    """Returns the number of episodes in which the model wrote something."""
    return (self._sums(batch['weights'], batch) > 0).sum().astype(jnp.float32)

  def _divergence(self, log_probs_BT: jax.Array, outputs: Outputs, batch: Batch) -> jax.Array:
    reference_BT = tempered(outputs.reference, batch['labels'], self.temperature)
    logs_BT = _of_own(reference_BT - log_probs_BT, batch)
    return jnp.exp(logs_BT) - logs_BT - 1


@dataclasses.dataclass(frozen=True)
class PackedPolicyLoss(PolicyLoss):
  """The loss of rows that hold several episodes, each a segment."""

  def _sums(self, x_BT: jax.Array, batch: Batch) -> jax.Array:
    return segment_sums.sums_at_ends(x_BT, batch['segment_ids'])

  def _totals(self, x_BT: jax.Array, batch: Batch) -> jax.Array:
    return segment_sums.totals(x_BT, batch['segment_ids'])


def tempered(outputs: Outputs, labels_BT: jax.Array, temperature: float) -> jax.Array:
  """Returns the log-probabilities of labels by softmax(logits / temperature), [B, T]."""
  if temperature == 1:
    return outputs.log_probs
  log_probs_BTV = jax.nn.log_softmax(outputs.logits / temperature)
  return jnp.take_along_axis(log_probs_BTV, labels_BT[..., None], -1)[..., 0]


def _of_own(x_BT: jax.Array, batch: Batch) -> jax.Array:
  """Returns x at the tokens that the model wrote, and 0 at others, whose exp might be infinite."""
  return jnp.where(batch['weights'] > 0, x_BT, 0)
