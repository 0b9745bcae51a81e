"""The schedule of a pipeline: the microbatch and the layers that a stage computes at each tick."""

import functools

import jax
import jax.numpy as jnp


class PipelineSchedule:
  """When a stage computes which microbatch with which of its groups of layers.

  Stage 0 begins with microbatch 0 at tick 0, and with a microbatch at every later tick, first
  with its group 0, then with group 1 … A microbatch that has left the last stage waits for its
  turn. If there are fewer microbatches than stages, stage 0 waits for it.

  Attributes:
    stages: Z.
    microbatches: I.
    repeats: R.
    period: The number of ticks between two groups of a stage.
    ticks: The number of ticks.
  """

  def __init__(self, stages: int, microbatches: int, repeats: int):
    self.stages, self.microbatches, self.repeats = stages, microbatches, repeats
    self.period = microbatches if repeats == 1 else max(microbatches, stages)
    self.ticks = (repeats - 1) * self.period + microbatches + stages - 1

  def work(self, tick: jax.Array, stage: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(repeat, microbatch, whether there is any work) of a stage at a tick."""
    since = tick - stage
    repeat, microbatch = jnp.divmod(since, self.period)
    works = (since >= 0) & (repeat < self.repeats) & (microbatch < self.microbatches)
    repeat = jnp.clip(repeat, 0, self.repeats - 1)
    return repeat, jnp.minimum(microbatch, self.microbatches - 1), works

  def exchange(
    self, waiting_ZIQbTD: jax.Array, arriving_ZQbTD: jax.Array, tick: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Stores the microbatch that the last stage has sent, and takes the next one of stage 0.

    All stages do the same with arrays of their own, but only those of stage 0 are used. The
    gradient is computed in place, too.

    Args:
      waiting_ZIQbTD: The microbatches before their next group of layers. Those that have left the
        last one are stored too, and not used.
      arriving_ZQbTD: The microbatch that each stage gets from the stage before it at this tick.
      tick: The number of the tick.

    Returns:
      The microbatches that wait, and the one that enters.
    """
    _, place, puts = self.work(tick, jnp.array(self.stages))
    _, taken, _ = self.work(tick, jnp.array(0))
    get = functools.partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=1)

    def exchange(
      waiting: jax.Array, arriving: jax.Array, *at: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      place, puts, taken = at
      waiting = put(waiting, jnp.where(puts, arriving, get(waiting, place)), place)
      return waiting, get(waiting, taken)

    def backward(
      at: tuple[jax.Array, ...], grads: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, None, None, None]:
      place, puts, taken = at
      waiting, entering = grads
      waiting = put(waiting, get(waiting, taken) + entering, taken)
      arriving = get(waiting, place)
      waiting = put(waiting, jnp.where(puts, 0, arriving), place)
      return waiting, jnp.where(puts, arriving, 0), None, None, None

    with_gradient = jax.custom_vjp(exchange)
    with_gradient.defvjp(lambda *arguments: (exchange(*arguments), arguments[2:]), backward)
    return with_gradient(waiting_ZIQbTD, arriving_ZQbTD, place, puts, taken)
