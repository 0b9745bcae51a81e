"""A loss beside those of paxlite: the squared logarithm of the sum of the exponentials."""

import dataclasses

import jax.numpy as jnp

from paxlite.config.templates import config
from paxlite.experiments.demo import TinyGPT
from paxlite.losses.loss import Loss


@dataclasses.dataclass(frozen=True)
class LogSumExp(Loss):
  """log²(Σ exp(logits)), the mean over the target tokens."""

  def __call__(self, outputs, batch):
    return (jnp.square(outputs.tokens.log_z) * batch['weights']).sum()

  def metrics(self, outputs, batch):
    return {'max_log_z': outputs.tokens.log_z.max()}


class WithLogSumExp(TinyGPT):
  MAX_STEPS = 3
  LR_COS_WARMUP = 1

  def losses(self):
    return super().losses() | {'log_sum_exp': config(LogSumExp, coefficient=0.1)}
