"""How many variables each part of an optimizer trains that treats variables in different ways."""

from collections.abc import Mapping

import jax

from paxlite.core.trees import PyTree
from paxlite.optim.muon import MuonState
from paxlite.optim.state_axes import named, parameter_of


def described(opt_state: PyTree, params: PyTree) -> list[str]:
  """Returns a sentence on each partitioned or masked state of optax; none for other optimizers.

  optax.contrib.muon, as an example, trains matrices by Muon and all other arrays by Adam.

  Args:
    opt_state: The state, or its shapes.
    params: The trainable parameters, or their shapes.
  """
  sizes = {name: x.size for name, x in named(params).items()}
  lines = []
  nodes = jax.tree.leaves(opt_state, is_leaf=_is_split)
  for node in nodes:
    if not _is_split(node):
      continue
    parts = _parts(node)
    held = {label: _names(part, sizes) for label, part in parts.items()}
    stateless = [label for label, names in held.items() if not names]
    if len(stateless) == 1 and len(held) > 1:  # as plain SGD: it trains what no other part does
      held[stateless[0]] = set(sizes) - set().union(*held.values())
    texts = [
      f'{label} {len(names):,} of {len(sizes):,} arrays '
      f'({sum(sizes[name] for name in names):,} parameters)'
      for label, names in held.items()
      if names or len(stateless) < 2  # of several parts without arrays it is not known
    ]
    if any(held.values()):
      lines.append(f'The parts of the optimizer train: {", ".join(texts)}.')
  is_averaged = lambda x: type(x).__name__ == 'ScheduleFreeState'
  if any(map(is_averaged, jax.tree.leaves(opt_state, is_leaf=is_averaged))):
    lines.append(
      'Evaluation and export use the weights of the gradients, not the average that a '
      'schedule-free optimizer keeps.'
    )
  return lines


def _is_split(node: object) -> bool:
  is_masked = hasattr(node, 'inner_states') or type(node).__name__ == 'MaskedState'
  return is_masked or isinstance(node, MuonState)


def _parts(node: PyTree) -> Mapping[str, PyTree]:
  if hasattr(node, 'inner_states'):
    return {str(label): part for label, part in node.inner_states.items()}
  if isinstance(node, MuonState):
    return {'Muon': node.momentum, 'Adam': node.adam}
  return {'the masked one': node}


def _names(part: PyTree, sizes: dict[str, int]) -> set[str]:
  """Returns the names of the variables for which a part has an array."""
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(part)]
  return {name for path in paths if (name := parameter_of(path, sizes)) is not None}
