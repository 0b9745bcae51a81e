"""Learning-rate schedules with Pax's exact values, as functions of the update count."""

import jax.numpy as jnp
import optax


def constant(learning_rate: float) -> optax.Schedule:
  return lambda count: jnp.full((), learning_rate, jnp.float32)


def linear_rampup_cosine_decay(
  learning_rate: float,
  warmup: int,
  decay_start: int,
  decay_end: int,
  min_ratio: float = 0.1,
  peak: float = 1.0,
) -> optax.Schedule:
  """Linear from 0 to `peak` at `warmup`, flat until `decay_start`, a half cosine to `min_ratio`.

  Args:
    learning_rate: Multiplies the schedule.
    warmup: Updates until the ramp-up ends; update 0 has learning rate 0.
    decay_start: Update at which the cosine starts, ≥ warmup.
    decay_end: Update from which the multiplier stays min_ratio · peak.
    min_ratio: Share of `peak` that remains.
    peak: Multiplier at the top.
  """

  def multiplier(count):
    count = jnp.asarray(count, jnp.float32)
    rampup = peak * count / jnp.maximum(warmup, 1)
    progress = jnp.clip((count - decay_start) / (decay_end - decay_start), 0.0, 1.0)
    cosine = peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))
    return jnp.where(count < warmup, rampup, cosine)

  return lambda count: learning_rate * multiplier(count)


def linear_rampup_exponential_decay(
  learning_rate: float,
  warmup: int,
  decay_start: int,
  decay_end: int,
  min_ratio: float = 0.1,
  peak: float = 1.0,
) -> optax.Schedule:
  """As above, with peak · min_ratio^progress in place of the cosine."""

  def multiplier(count):
    count = jnp.asarray(count, jnp.float32)
    rampup = peak * count / jnp.maximum(warmup, 1)
    progress = jnp.clip((count - decay_start) / (decay_end - decay_start), 0.0, 1.0)
    return jnp.where(count < warmup, rampup, peak * min_ratio**progress)

  return lambda count: learning_rate * multiplier(count)
