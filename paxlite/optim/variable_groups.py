"""Learning rates and weight decays of some variables, which patterns of names choose."""

import math
import re
from collections.abc import Sequence

import jax
import optax
from jax.tree_util import KeyPath

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name

Factors = Sequence[tuple[str, float]]
"""Pairs of a regular expression and a factor, of which the first that matches a variable counts."""


def parsed(texts: Sequence[str], attribute: str) -> list[tuple[str, float]]:
  """Returns the factors that an attribute states as 'PATTERN=FACTOR'.

  Raises UserError if a text has another form.
  """
  found = []
  for text in texts:
    pattern, is_there, factor = text.rpartition('=')
    try:
      found.append((pattern, float(factor)))
      re.compile(pattern)
      is_right = bool(is_there) and 0 <= float(factor) < math.inf
    except (ValueError, re.error):
      is_right = False
    if not is_right:
      raise UserError(
        f"{attribute}: {text!r} must be PATTERN=FACTOR, as '.*/b=0': a regular expression of whole "
        'names of variables, and a number that is not negative'
      )
  return found


def check(factors: Factors, names: Sequence[str], attribute: str) -> None:
  """Raises UserError if an expression matches none of the trainable variables."""
  for pattern, _ in factors:
    if not any(re.fullmatch(pattern, name) for name in names):
      raise UserError(
        f'{attribute}: {pattern!r} matches the whole name of no trainable variable, such as '
        f'{names[0] if names else "none"}'
      )


def factor_of(factors: Factors, name: str) -> float:
  """Returns the factor of a variable; 1 if it has none."""
  return next((factor for pattern, factor in factors if re.fullmatch(pattern, name)), 1.0)


def scaled(tree: PyTree, factors: Factors) -> PyTree:
  """Returns a tree of variables or updates, each times its factor, or 1 if it has none."""
  if not factors:
    return tree

  def one(path: KeyPath, x: jax.Array) -> jax.Array:
    factor = factor_of(factors, path_name(path))
    return x if factor == 1 else factor * x

  return jax.tree_util.tree_map_with_path(one, tree)


def decayed(weight_decay: float, texts: Sequence[str] = ()) -> optax.GradientTransformation:
  """Adds to each update weight_decay times its variable, and times its factor of `texts`."""
  factors, plain = parsed(texts, 'WEIGHT_DECAY_FACTORS'), optax.add_decayed_weights(weight_decay)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
    return plain.update(updates, state, scaled(params, factors))

  def init(params: PyTree) -> PyTree:
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    check(factors, names, 'WEIGHT_DECAY_FACTORS')
    return plain.init(params)

  return optax.GradientTransformation(init, update)
