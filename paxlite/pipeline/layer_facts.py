"""Facts about a layer that a pipeline needs, found by tracing the layer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core.scope import LazyRng
from jax.tree_util import keystr

from paxlite.core.training_rules import rule_of
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.layers.sown import SOWN

if TYPE_CHECKING:
  from jax.extend.core import JaxprEqn, Var


# 'add' for what is zero if the result of a layer is not used; 'count' for what is not
Combine = Literal['add', 'count', 'max']


class LayerFacts(NamedTuple):
  """The facts about a layer."""

  # the logical axes of each variable, in the order of jax.tree.leaves
  axes: list[tuple[str | None, ...]]
  # The dtype in which the layer reads each variable. It is narrower than the variable's own dtype
  # if the layer only casts the variable to it.
  dtypes: list[np.dtype]
  # how the results of microbatches for a variable are combined: gradients are added, what a rule
  # moves a variable by is counted, and of new values of an FP8 state there is the maximum
  combine: list[Combine]
  draws: bool  # whether the layer draws random numbers
  sows: bool  # whether it sows losses or summaries
  has_experts: bool  # whether it has experts


def layer_facts(
  block: nn.Module,
  stack: Mapping[str, PyTree],
  rows: jax.ShapeDtypeStruct,
  has_segments: bool,
  rng: LazyRng | None,
) -> LayerFacts:
  """Traces a layer.

  Args:
    block: The layer, without a parent.
    stack: The variables of the stack by collection, [L, …] each.
    rows: The shape and dtype of its input [B, T, D].
    has_segments: Whether it gets segment ids.
    rng: The stack's key of dropout; None if dropout is off.
  """
  leaves, tree = jax.tree.flatten(stack)
  variables = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in leaves]
  tokens = jax.ShapeDtypeStruct(rows.shape[:2], jnp.int32)
  keys = {} if rng is None else {'dropout': rng.rng}

  def apply(
    variables: list[jax.Array], keys: dict[str, jax.Array], x: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    return block.apply(
      jax.tree.unflatten(tree, variables), x, tokens, tokens if has_segments else None,
      rngs=keys or None, mutable=SOWN,
    )  # fmt: skip

  traced, (_, sown) = jax.make_jaxpr(apply, return_shape=True)(variables, keys, rows, tokens)
  arguments = traced.jaxpr.invars
  uses: dict[Var, list[JaxprEqn]] = {variable: [] for variable in arguments}
  for equation in traced.jaxpr.eqns:
    for variable in equation.invars:
      if variable in arguments:
        uses[variable].append(equation)

  def dtype(variable: 'Var', own: np.dtype) -> np.dtype:
    casts = {
      e.params['new_dtype'] if e.primitive.name == 'convert_element_type' else None
      for e in uses[variable]
    }
    (cast,) = casts if len(casts) == 1 else (None,)
    if cast is None or jnp.finfo(cast).bits >= jnp.finfo(own).bits:
      return own
    return cast

  first = jax.ShapeDtypeStruct((1, 1, rows.shape[2]), rows.dtype)
  boxed = jax.eval_shape(
    lambda x, tokens: block.init(jax.random.key(0), x, tokens, None),
    first,
    jax.ShapeDtypeStruct((1, 1), jnp.int32),
  )
  is_boxed = lambda x: isinstance(x, nn.LogicallyPartitioned)
  names = {
    keystr(path): x.names
    for path, x in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_boxed)
    if is_boxed(x)
  }
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(stack)]
  axes = [
    names.get(keystr(path), (None,) * len(w.shape))
    for path, w in zip(paths, variables, strict=True)
  ]
  n = len(variables)
  return LayerFacts(
    axes=axes, dtypes=[dtype(v, w.dtype) for v, w in zip(arguments[:n], variables, strict=True)],
    combine=[_combine(path_name(path).split('/')) for path in paths],
    draws=any(uses[variable] for variable in arguments[n : n + len(keys)]),
    sows=bool(jax.tree.leaves(sown)), has_experts=any('experts' in one for one in axes),
  )  # fmt: skip


def _combine(names: list[str]) -> Combine:
  collection, *_, variable = names
  if collection != 'params':
    return 'max'
  return 'add' if rule_of(variable) is None else 'count'
