"""Loss terms and summaries, which layers return in addition to their result by Flax's `sow`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlite.core.trees import PyTree

LOSSES, SUMMARIES = 'losses', 'summaries'
SOWN = (LOSSES, SUMMARIES)
CHOSEN = 'chosen_experts'  # of mixtures of experts, where it is asked for: moe/chosen_experts.py


def total_loss(variables: Mapping[str, PyTree]) -> jax.Array:
  """Returns the sum of all loss terms of all layers, or 0 if there are none."""
  return sum((x.sum() for x in jax.tree.leaves(variables.get(LOSSES, {}))), jnp.zeros(()))


def is_maximum(summary: str) -> bool:
  """Returns whether values of a summary are combined by their maximum instead of their mean."""
  return summary.startswith('max_')


def is_count(metric: str) -> bool:
  """Returns whether values of a metric are added up."""
  return metric.startswith('num_')


def over_layers(variables: Mapping[str, PyTree]) -> dict[str, jax.Array]:
  """Returns each summary's mean over the layers that have it, or its maximum (see is_maximum)."""
  values: dict[str, list[jax.Array]] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(variables.get(SUMMARIES, {})):
    name = [k.key for k in path if hasattr(k, 'key')][-1]
    values.setdefault(name, []).append(jnp.ravel(x).astype(jnp.float32))
  reduce = lambda name, x: x.max() if is_maximum(name) else x.mean()
  return {name: reduce(name, jnp.concatenate(xs)) for name, xs in sorted(values.items())}
