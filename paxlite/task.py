"""Model, loss, metrics and optimizer as pure functions of (state or params, batch, rng)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxlite.layers.language_model import TransformerLm
from paxlite.layers.sown import SOWN, mean_summaries, total_loss
from paxlite.metrics import Metrics, Weighted
from paxlite.optimizers import Optimizer, merge
from paxlite.train_state import TrainState

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
  """Next-token prediction with a language model.

  A batch holds ids, labels [B, T] int32 and weights [B, T] float32; packed ones also segment_ids
  (0 is padding) and segment_pos [B, T] int32.

  Attributes:
    model: The language model.
    optimizer: See optimizers.Optimizer.
    num_microbatches: The batch of a step is split into this many, one after the other.
    mean_over_padding: Whether the loss is a mean over all positions (GLaM), not over the targets.
    max_skipped_steps: After this many non-finite gradients in a row the state stays as it is.
  """

  model: TransformerLm
  optimizer: Optimizer
  num_microbatches: int = 1
  mean_over_padding: bool = False
  max_skipped_steps: int = 100

  def init_params(self, rng: jax.Array) -> Any:
    """Parameters, boxed with their logical axes (flax.linen.LogicallyPartitioned)."""
    return self.model.init(rng, jnp.zeros((1, 1), jnp.int32))['params']

  def init(self, rng: jax.Array) -> TrainState:
    """A new state; parameters and moments are boxed with their logical axes."""
    params = self.init_params(rng)
    trainable, _ = self.optimizer.split(params)
    zero = jnp.zeros((), jnp.int32)
    opt_state = self.optimizer.transformation.init(trainable)
    return TrainState(zero, params, opt_state, skipped=zero, skipped_in_a_row=zero)

  def loss(
    self, params: Any, batch: Batch, rng: jax.Array | None = None
  ) -> tuple[jax.Array, Metrics]:
    """The mean cross-entropy per target token in nats plus what layers add, and Pax's metrics.

    Args:
      params: Unboxed parameters.
      batch: See the class.
      rng: For dropout; None turns dropout off.

    Returns:
      Σ(xent·w) / (Σw + 1e-6) + auxiliary losses, and the metrics.
    """
    (losses, sown) = self.model.apply(
      {'params': params},
      batch['ids'],
      batch['labels'],
      batch.get('segment_pos'),
      batch.get('segment_ids'),
      rngs=None if rng is None else {'dropout': rng},
      method='losses',
      mutable=SOWN,
    )
    weights = batch['weights']
    num_predictions = weights.sum()
    mean = lambda x: (x * weights).sum() / (num_predictions + 1e-6)
    one = jnp.ones(())
    xent = Weighted(mean(losses.xent), num_predictions)
    if self.mean_over_padding:
      positions = self._xent_weight(weights)
      xent = Weighted((losses.xent * weights).sum() / jnp.maximum(positions, 1), positions)
    aux_loss = total_loss(sown)
    loss = xent.value + aux_loss
    return loss, {
      'total_loss': Weighted(loss, num_predictions),
      'avg_xent': xent,
      'aux_loss': Weighted(aux_loss, one),
      'log_pplx': xent,
      'fraction_of_correct_next_step_preds': Weighted(mean(losses.correct), num_predictions),
      'num_predictions': Weighted(num_predictions, one),
    } | {name: Weighted(value, one) for name, value in mean_summaries(sown).items()}

  def grads(self, params: Any, batch: Batch, rng: jax.Array | None) -> tuple[Any, Metrics]:
    """Gradients of the loss by the trainable parameters, and the metrics.

    Microbatches are averaged by their number of target tokens, so that their number changes the
    result by rounding (and by dropout's masks) alone; terms that layers add, by their number.
    """
    trainable, frozen = self.optimizer.split(params)

    def loss(trainable, batch, rng):
      return self.loss(merge(trainable, frozen), batch, rng)

    grad = jax.grad(loss, has_aux=True)
    if self.num_microbatches == 1:
      return grad(trainable, batch, rng)

    n = self.num_microbatches
    # every n-th row, so that each device's rows stay on it
    split = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), batch)
    whole = jnp.maximum(self._xent_weight(batch['weights']), 1e-6)

    def part(trainable, microbatch, rng):
      _, metrics = loss(trainable, microbatch, rng)
      xent, aux_loss = metrics['avg_xent'], metrics['aux_loss']
      return xent.value * xent.weight / whole + aux_loss.value / n, metrics

    def accumulate(total, inputs):
      i, microbatch = inputs
      rng_i = None if rng is None else jax.random.fold_in(rng, i)
      g, metrics = jax.grad(part, has_aux=True)(trainable, microbatch, rng_i)
      return jax.tree.map(jnp.add, total, g), metrics

    zeros = jax.tree.map(jnp.zeros_like, trainable)
    grads, metrics = jax.lax.scan(accumulate, zeros, (jnp.arange(n), split))
    mean = {k: _over_microbatches(k, m) for k, m in metrics.items()}
    total = mean['avg_xent'].value + mean['aux_loss'].value
    mean['total_loss'] = Weighted(total, mean['total_loss'].weight)
    return grads, mean

  def _xent_weight(self, weights_BT: jax.Array) -> jax.Array:
    """What the sum of cross-entropies is divided by; rows without a target are not there."""
    if not self.mean_over_padding:
      return weights_BT.sum()
    return (weights_BT.max(1) > 0).sum() * jnp.float32(weights_BT.shape[1])


def _over_microbatches(name: str, m: Weighted) -> Weighted:
  """One metric of a whole step from those of its microbatches [n]."""
  if name == 'num_predictions':  # a count of the step, not a mean of counts
    return Weighted(m.value.sum(), m.weight.mean())
  weight = m.weight.sum()
  return Weighted((m.value * m.weight).sum() / jnp.maximum(weight, 1e-6), weight)
