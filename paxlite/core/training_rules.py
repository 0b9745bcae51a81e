"""How variables are trained that no gradient trains: a layer that makes one declares its name.

    BIAS = moved_by('replaced_bias', balanced)  # in the module of the layer

Names are those of variables or, for all variables below it, of a module.
"""

from collections.abc import Callable
from typing import Any

# (variable, what stands for its gradient, summed over the batch) -> the variable after a step
Rule = Callable[[Any, Any], Any]

_never_trained: set[str] = set()
_rules: dict[str, Rule] = {}


def never_trained(name: str) -> str:
  """Declares that training leaves the variables of this name alone; returns the name."""
  _never_trained.add(name)
  return name


def moved_by(name: str, rule: Rule) -> str:
  """Declares that a rule moves the variables of this name once a step; returns the name.

  The layer returns a count as the gradient of the variable. Counts are added up over devices,
  microbatches and ticks of a pipeline.
  """
  _rules[name] = rule
  return name


def is_never_trained(path: str) -> bool:
  """Returns whether training leaves a variable alone, such as 'transformer/x_layers_0/qkv/w'."""
  return not _never_trained.isdisjoint(path.split('/'))


def rule_of(path: str) -> Rule | None:
  """Returns the rule that moves a variable; None for all others."""
  return _rules.get(path.rpartition('/')[2])
