"""Checksums of what each layer of a model makes of the batch of a step."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.variable_names import REPEATED
from paxlite.proof.shard_sums import bits
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState

Outputs = dict[str, int]


def layer_outputs(
  sharded: ShardedTask, state: TrainState, batch: Mapping[str, jax.Array], key: jax.Array
) -> Outputs:
  """Returns a checksum of the output of each module, by its name, in the order of the calls.

  A module that is called again has the number of the call after its name. Repeated layers, which
  are one module with a loop, are left out; what they make together is the output of `transformer`.

  Args:
    state: The state before the step.
    batch: The batch of the step.
    key: The random key of dropout.
  """
  names: list[str] = []
  calls: collections.Counter[str] = collections.Counter()
  found: Outputs = {}

  def noted(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], where: Any
  ) -> Any:
    output = call(*args, **kwargs)
    path = where.module.path
    if where.method_name != '__call__' or not path or REPEATED in path:
      return output
    name = '/'.join(path)
    calls[name] += 1
    name = name if calls[name] == 1 else f'{name} (call {calls[name]})'
    names.append(name)
    jax.debug.callback(lambda x, name=name: found.update({name: int(x)}), _checksum(output))
    return output

  def forward(params: Any, batch: Mapping[str, jax.Array], fp8_state: Any) -> jax.Array:
    with nn.intercept_methods(noted):
      return sharded.task.loss_and_metrics(params, dict(batch), key, fp8_state)[0]

  with sharded.compiling():
    jax.jit(forward)(state.params, dict(batch), state.fp8_state).block_until_ready()
  jax.effects_barrier()
  return {name: found[name] for name in names if name in found}


def first_difference(one: Outputs, other: Outputs) -> str | None:
  """Returns the name of the first common module with different outputs, or None."""
  return next((name for name in one if name in other and one[name] != other[name]), None)


def _checksum(output: Any) -> jax.Array:
  """Returns a number uint32 that nearly always differs where any bit of the arrays does."""
  total = jnp.uint32(0)
  for leaf in jax.tree.leaves(output):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
      flat = bits(leaf).astype(jnp.uint32).ravel()
      odd = 2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1
      total = total * jnp.uint32(31) + (flat * odd).sum()
  return total
