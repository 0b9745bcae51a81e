"""One client's adapter: its factors, its gradients since the last step, and its Adam moments."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paxlite.core.errors import UserError
from paxlite.training_api.adapted_model import AdaptedModel, Arrays
from paxlite.training_api.examples import LossExamples, batches


@dataclasses.dataclass(frozen=True)
class AdamValues:
  """The values of one step of AdamW, by the client's names and with its defaults.

  A weight decays by learning_rate·weight_decay of itself. With grad_clip_norm above 0, gradients
  of a larger norm are scaled down to it, as torch.nn.utils.clip_grad_norm_ does.
  """

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0


class TrainedAdapter:
  """An adapter that a client trains.

  Args:
    model: The model with factors of its kind.
    factors: Its factors.
    moments: Those of Adam; None: none yet.
  """

  def __init__(
    self, model: AdaptedModel, factors: Arrays, moments: optax.ScaleByAdamState | None = None
  ):
    self.model, self.factors = model, factors
    self.moments = new_moments(factors) if moments is None else moments
    self._gradients: Arrays | None = None
    self._failure = ''  # of a request since the last step, without which the step would be wrong

  def run(self, examples: LossExamples, learns: bool) -> tuple[list[np.ndarray], float]:
    """Returns the log-probabilities of the target tokens of each example, and the sum of losses.

    Args:
      examples: The examples.
      learns: Whether the gradients are added to those of the next step.

    Raises:
      UserError: The loss is not a finite number. Then no gradient is added.
    """
    found = [np.zeros(0, np.float32)] * len(examples.examples)
    total, sums = 0.0, self._gradients
    for indices, batch in batches(examples.examples, self.model.base.max_length):
      loss, log_probs_BT, gradients = self.model.run(
        self.factors, batch, examples.loss, examples.settings, learns
      )
      value, rows = jax.device_get((loss, log_probs_BT))
      for i, row in zip(indices, rows, strict=False):
        found[i] = row[: len(examples.examples[i].ids)].astype(np.float32)
      total += float(value)
      if gradients is not None:
        sums = gradients if sums is None else _added(sums, gradients)
    if not np.isfinite(total):
      raise UserError(
        f'the sum of the losses is {total}: look for extreme weights, advantages or logprobs, or '
        'a learning rate that was too large'
      )
    if learns:
      self._gradients = sums
    return found, total

  def fail(self, error: str) -> None:
    """Notes that gradients are missing, so that the next step says so and changes nothing."""
    self._failure = self._failure or error

  def step(self, values: AdamValues) -> dict[str, float]:
    """Updates the factors with the gradients since the last step; returns their norm.

    Raises:
      UserError: There are none, or a part of them has failed. The gradients are gone.
    """
    gradients, self._gradients = self._gradients, None
    failure, self._failure = self._failure, ''
    if failure:
      raise UserError(
        f'no step was made, because a forward_backward before it has failed ({failure}): send its '
        'examples again, and then optim_step'
      )
    if gradients is None:
      raise UserError('there are no gradients since the last optim_step: call forward_backward')
    factors, moments, norm = _stepped(
      self.factors, self.moments, gradients, dataclasses.asdict(values)
    )
    if not np.isfinite(float(norm)):
      raise UserError(f'no step was made, because the norm of the gradients is {float(norm)}')
    self.factors, self.moments = factors, moments
    return {'grad_norm': float(norm)}

  def replace(self, factors: Arrays, moments: optax.ScaleByAdamState | None) -> None:
    """Takes saved factors, and saved moments or the present ones; gradients are dropped."""
    self.factors, self._gradients, self._failure = factors, None, ''
    self.moments = self.moments if moments is None else moments


def new_moments(factors: Arrays) -> optax.ScaleByAdamState:
  found: Any = optax.scale_by_adam().init(dict(factors))
  return cast(optax.ScaleByAdamState, found)


@jax.jit
def _added(a: Arrays, b: Arrays) -> Arrays:
  found: Arrays = jax.tree.map(jnp.add, a, b)
  return found


@jax.jit
def _stepped(
  factors: Arrays,
  moments: optax.ScaleByAdamState,
  gradients: Arrays,
  values: Mapping[str, jax.Array],
) -> tuple[Arrays, optax.ScaleByAdamState, jax.Array]:
  norm = optax.tree.norm(gradients)
  most = values['grad_clip_norm']
  scale = jnp.where(most > 0, jnp.minimum(1, most / (norm + 1e-6)), 1)
  adam = optax.scale_by_adam(values['beta1'], values['beta2'], values['eps'])
  scaled: Any = jax.tree.map(lambda g: g * scale, gradients)
  found: Any = adam.update(scaled, moments)
  updates, moments = found
  rate, decay = values['learning_rate'], values['weight_decay']
  moved = jax.tree.map(lambda w, u: w - rate * (u + decay * w), factors, updates)
  return moved, moments, norm
