"""The variables of a tree by name, with their types and shapes, and how two trees differ."""

import re
from collections.abc import Mapping

import jax
import numpy as np

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name


def shapes_of(tree: PyTree) -> dict[str, str]:
  """Returns dtype and shape of the leaves of a tree, by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, 'shape'))
  return {path_name(p): f'{np.dtype(x.dtype).name}{list(x.shape)}' for p, x in leaves}


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
  """Returns what is wrong with the variables of a checkpoint, one text for each variable.

  float32 and bfloat16 do not differ: parameters and moments are kept in either, and a variable of
  one type is restored in the other. To bfloat16 it is rounded to the nearest.

  Args:
    found: What the checkpoint holds, as shapes_of returns it.
    wanted: What the state to restore holds.
  """
  either = lambda shape: re.sub(r'^(bfloat16|float32)\b', 'float', shape)
  differences = [f'{n} is missing' for n in wanted.keys() - found.keys()]
  differences += [f'{n} is not in the model' for n in found.keys() - wanted.keys()]
  return differences + [
    f'{n} is {found[n]} and the model has {wanted[n]}'
    for n in wanted.keys() & found.keys()
    if either(wanted[n]) != either(found[n])
  ]


def conversion_hint(differences: list[str]) -> str:
  """Returns a hint for differences that an attribute causes, or ''."""
  if any(text.startswith('opt_state/average/') for text in differences):
    return '; a run cannot start or stop averaging weights: restore the former EMA_DECAY'
  names = {text.partition(' ')[0] for text in differences}
  if any(name.rpartition('/')[0] in names for name in names):  # w, and w/values in place of it
    return '; frozen weights cannot change their dtype: restore the former FROZEN_DTYPE'
  if not any('/te/' in text for text in differences):
    return ''
  return '; paxlite convert-te converts between USE_TE=layer and others'
