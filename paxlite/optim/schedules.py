"""Learning-rate schedules as functions of the update count.

LR_SCHEDULE names one of them; `schedule()` of experiments/parts/optimization.py builds it. Those
that begin with linear_rampup have Pax's exact values.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax


def constant(learning_rate: float) -> optax.Schedule:
  return lambda count: jnp.full((), learning_rate, jnp.float32)


def linear(
  learning_rate: float, warmup: int, decay_end: int, min_ratio: float = 0.0
) -> optax.Schedule:
  """Returns a schedule that ramps up to `learning_rate` and falls, both linearly.

  Args:
    learning_rate: The largest rate.
    warmup: Update at which the ramp from 0 ends; 0: there is none.
    decay_end: Update from which the rate stays at min_ratio · learning_rate.
    min_ratio: Share of `learning_rate` that remains.
  """
  return warmup_stable_decay(learning_rate, warmup, decay_end - warmup, [decay_end], min_ratio)


def inverse_sqrt(learning_rate: float, warmup: int) -> optax.Schedule:
  """Returns learning_rate · min(t / warmup, √(warmup / t)), https://arxiv.org/abs/1706.03762, 5.3.

  Args:
    learning_rate: The rate at update `warmup`, the largest.
    warmup: At least 1.
  """

  def schedule(count: jax.typing.ArrayLike) -> jax.Array:
    share = jnp.asarray(count, jnp.float32) / warmup
    return learning_rate * jnp.minimum(share, jax.lax.rsqrt(jnp.maximum(share, 1.0)))

  return schedule


DecayShape = Literal['linear', '1-sqrt', 'cosine']

_SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'linear': lambda progress: 1 - progress,
  '1-sqrt': lambda progress: 1 - jnp.sqrt(progress),
  'cosine': lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
}


def warmup_stable_decay(
  learning_rate: float,
  warmup: int,
  decay_steps: int,
  decay_ends: Sequence[int],
  min_ratio: float = 0.0,
  shape: DecayShape = 'linear',
) -> optax.Schedule:
  """Returns a schedule that ramps up linearly, holds, and decays, once or several times.

  After each decay but the last it is back at `learning_rate` at once, so that a run whose rate has
  decayed can go on (WSD, https://arxiv.org/abs/2404.06395; WSD-S, https://arxiv.org/abs/2410.05192).

  Args:
    learning_rate: The largest rate.
    warmup: Update at which the ramp from 0 ends; 0: there is none.
    decay_steps: The number of updates of each decay.
    decay_ends: The update at which each decay ends, in their order; after the last one the rate
      stays at min_ratio · learning_rate.
    min_ratio: Share of `learning_rate` that is left at the end of a decay.
    shape: 'linear', '1-sqrt' (https://arxiv.org/abs/2405.18392) or 'cosine'.
  """
  starts_again = [0, *decay_ends[:-1]]

  def schedule(count: jax.typing.ArrayLike) -> jax.Array:
    count = jnp.asarray(count, jnp.float32)
    multiplier = jnp.ones(())
    for again, end in zip(starts_again, decay_ends, strict=True):
      progress = jnp.clip((count - (end - decay_steps)) / decay_steps, 0.0, 1.0)
      decayed = min_ratio + (1 - min_ratio) * _SHAPES[shape](progress)
      multiplier = jnp.where(count > again, decayed, multiplier)
    rampup = jnp.minimum(count / max(warmup, 1), 1.0) if warmup else 1.0
    return learning_rate * rampup * multiplier

  return schedule


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
