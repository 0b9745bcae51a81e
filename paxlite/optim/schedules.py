"""Learning-rate schedules with Pax's exact values, as functions of the update count.

LR_SCHEDULE names one of them; `schedule()` of experiments/parts/optimization.py builds it.
"""

from collections.abc import Callable

import jax
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
  """Returns a schedule that ramps up linearly, holds, and decays with a half cosine.

  Args:
    learning_rate: Factor of the whole schedule.
    warmup: Update at which the linear ramp from 0 reaches `peak`; update 0 has learning rate 0.
    decay_start: Update at which the cosine starts, ≥ warmup.
    decay_end: Update from which the multiplier stays at min_ratio · peak.
    min_ratio: Share of `peak` that remains at the end.
    peak: Largest multiplier.
  """

  def decay(progress: jax.Array) -> jax.Array:
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))

  return _linear_rampup(learning_rate, warmup, decay_start, decay_end, peak, decay)


def linear_rampup_exponential_decay(
  learning_rate: float,
  warmup: int,
  decay_start: int,
  decay_end: int,
  min_ratio: float = 0.1,
  peak: float = 1.0,
) -> optax.Schedule:
  """Like linear_rampup_cosine_decay, with peak · min_ratio^progress instead of the cosine."""

  def decay(progress: jax.Array) -> jax.Array:
    return min_ratio**progress

  return _linear_rampup(learning_rate, warmup, decay_start, decay_end, peak, decay)


def _linear_rampup(
  learning_rate: float,
  warmup: int,
  decay_start: int,
  decay_end: int,
  peak: float,
  decay: Callable[[jax.Array], jax.Array],
) -> optax.Schedule:
  """Ramps up, holds, then multiplies by decay(progress), where progress goes from 0 to 1."""

  def schedule(count: jax.typing.ArrayLike) -> jax.Array:
    count = jnp.asarray(count, jnp.float32)
    progress = jnp.clip((count - decay_start) / (decay_end - decay_start), 0.0, 1.0)
    rampup = count / jnp.maximum(warmup, 1)
    return learning_rate * peak * jnp.where(count < warmup, rampup, decay(progress))

  return schedule
