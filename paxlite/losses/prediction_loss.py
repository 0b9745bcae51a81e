"""The loss of modules that predict the tokens after the next one."""

import dataclasses
from collections.abc import Mapping

import jax

from paxlite.layers.multi_token_prediction import following
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs


@dataclasses.dataclass(frozen=True)
class PredictionLoss(Loss):
  """The cross-entropy of one prediction module, the mean over the targets that are far enough.

  A target counts where the token that it is predicted from, `distance` + 1 tokens before it, is in
  the same segment. It is a term of equation 25 of https://arxiv.org/abs/2412.19437, section 2.2,
  whose coefficient is PREDICTION_LOSS_WEIGHT divided by the number of modules.
  """

  # 1 for the module that predicts the token after the next one, 2 for the one after it
  distance: int = 1

  @property
  def followed(self) -> Mapping[str, str]:  # type: ignore[override]
    """The accuracy, which says how often a draft of the module would be right."""
    return {self._accuracy: f'mtp {self.distance} accuracy {{:.3f}}'}

  @property
  def _accuracy(self) -> str:
    return f'fraction_of_correct_mtp_{self.distance}'

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return (outputs.tokens_after(self.distance).xent * self._weights(batch)).sum()

  def weight(self, batch: Batch) -> jax.Array:
    return self._weights(batch).sum()

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    weights_BT = self._weights(batch)
    correct = (outputs.tokens_after(self.distance).correct * weights_BT).sum()
    return {self._accuracy: Weighted.mean(correct, weights_BT.sum())}

  def _weights(self, batch: Batch) -> jax.Array:
    return following(batch['weights'], self.distance, batch.get('segment_ids'))[0]
