"""The exponential moving average of the trained weights, which evaluations and exports take."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxlite.core.trees import PyTree
from paxlite.parallel.partitioning import is_on_host


class Averaged(NamedTuple):
  """An optimizer's state with an average of the weights."""

  optimizer: PyTree  # the state of the optimizer
  average: PyTree  # the average, a tree like the trainable parameters
  num_averaged: jax.Array  # number of updates that it is an average of, int32

  @classmethod
  def of(cls, optimizer: PyTree, params: PyTree) -> 'Averaged':
    """Returns the first state, in which the average is a copy of the parameters."""
    return cls(optimizer, jax.tree.map(jnp.copy, params), jnp.zeros((), jnp.int32))

  def updated(
    self, optimizer: PyTree, params: PyTree, decay: float, valid: jax.Array
  ) -> 'Averaged':
    """Returns the next state.

    The first weights are taken as they are, and later ones by average + (1 − decay) · (weights −
    average), as torch.optim.swa_utils.AveragedModel does it.

    Args:
      optimizer: The next state of the optimizer.
      params: The next parameters.
      decay: Share of the average that stays.
      valid: Whether this was an update; if not, nothing changes.
    """
    share = jnp.where(self.num_averaged == 0, 1.0, 1.0 - decay)
    move = lambda a, p: jnp.where(valid, a + share * (p - a), a)
    average = jax.tree.map(move, self.average, params)
    return Averaged(optimizer, average, self.num_averaged + valid)


def of_evaluation(opt_state: PyTree, trainable: PyTree) -> PyTree:
  """Returns the weights to evaluate, on the device: the average, if there is one of any update."""
  if not isinstance(opt_state, Averaged) or not int(opt_state.num_averaged):
    return trainable
  on_device = lambda x: jax.device_put(x, x.sharding.with_memory_kind('device'))
  put = lambda x: on_device(x) if is_on_host(x) else x
  return jax.tree.map(put, opt_state.average)
