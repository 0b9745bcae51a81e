"""The loss of reward models: a chosen answer is to have a larger reward than a rejected one.

A batch holds pairs as RewardRows packs them: `weights` is 1 at the last token of each answer,
where the model's one output is the reward.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlite.finetuning.preferences.preference_losses import Pairs, last_of_pairs, of_pairs
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs


@dataclasses.dataclass(frozen=True)
class BradleyTerry(Loss):
  """The mean over pairs of −log σ(r − r′) + c·(r + r′)², for rewards r and r′ of both answers.

  The first term is https://arxiv.org/abs/2203.02155, equation 1. The second one keeps rewards near
  0: https://arxiv.org/abs/2312.09244, equation 2.

  Attributes:
    center: c.
  """

  center: float = 0.0

  label = 'reward loss'
  larger_is_better = ('accuracy', 'margin')
  shown = {'accuracy': 'accuracy {:.3f}', 'margin': 'margin {:.3f}'}
  followed = shown

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    is_last, chosen, rejected = self._rewards(outputs, batch)
    losses_BT = -jax.nn.log_sigmoid(chosen - rejected)
    if self.center:
      losses_BT += self.center * jnp.square(chosen + rejected)
    return jnp.where(is_last, losses_BT, 0).sum()

  def weight(self, batch: Batch) -> jax.Array:
    return last_of_pairs(batch).sum().astype(jnp.float32)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted | jax.Array]:
    """Returns means over pairs, by the names that trl gives them."""
    is_last, chosen, rejected = self._rewards(outputs, batch)
    values = {
      'accuracy': chosen > rejected,
      'margin': chosen - rejected,
      'mean_reward': (chosen + rejected) / 2,
    }
    total = lambda x: jnp.where(is_last, x, 0).astype(jnp.float32).sum()
    return {name: Weighted.mean(total(x), self.weight(batch)) for name, x in values.items()}

  def _rewards(self, outputs: Outputs, batch: Batch) -> Pairs:
    return outputs.once(self, lambda: of_pairs(outputs.logits[..., 0], batch))
