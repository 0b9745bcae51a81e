"""FLOPs of a step of training for each number of its weights, where some of them are frozen.

A weight of n numbers takes 2n forward for a token, 2n for the gradient of its input, and 2n for its
own: the 6N of https://arxiv.org/abs/2001.08361, section 2.1. A frozen weight has no gradient of its
own, and in a layer before the first trained variable nor has its input. So LoRA takes 4N, and 6 for
each number of its factors. The layers of a repeated stack count as one.
"""

import dataclasses
import math
import re
from collections.abc import Collection

from paxlite.core.training_rules import is_never_trained
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import DORA_VARIABLES, PREDICTIONS, REFERENCE
from paxlite.optim.state_axes import is_box, named
from paxlite.parallel.quantized_weights import is_quantized, num_parameters
from paxlite.parallel.weight_dims import dims_of

_LAYER = re.compile(r'transformer/x_layers_(\d+)/')
_EMBEDDING, _HEAD = 'embedding/', 'softmax/'
_TABLES = _EMBEDDING, 'position_emb/', _HEAD
_BEHIND = 'final_ln/', 'predictions_', _HEAD  # the stack


@dataclasses.dataclass(frozen=True)
class TokenFlops:
  """FLOPs for a token."""

  weights: float = 6.0  # for each number of the weights of layers, on average; 6 if all are trained
  head: float = 6.0  # for each number of the output head
  passed: float = 1.0  # the share of the layers, the last ones, through which a gradient passes
  factors: float = 0.0  # of all factors of LoRA together


def rates(trained: Collection[str], boxed: PyTree, active: float) -> TokenFlops:
  """Returns the FLOPs where the variables of these names are trained.

  Args:
    trained: Names of variables.
    boxed: All parameters or their shapes, in the boxes of their layers.
    active: The share of the experts that a token is multiplied with.
  """
  numbers = _numbers(boxed, active)
  is_left = lambda name: name in trained or not re.fullmatch(PREDICTIONS, name)
  numbers = {name: count for name, count in numbers.items() if is_left(name)}  # others may not run
  layers = 1 + max((int(found[1]) for name in numbers if (found := _LAYER.match(name))), default=0)
  first = min((_place(name, layers) for name in trained), default=math.inf)
  flops = {
    name: 2.0 * count * (1 + (first <= _place(name, layers)) + (name in trained))
    for name, count in numbers.items()
  }
  factors = {name for name in numbers if re.fullmatch(DORA_VARIABLES, name)}
  weights = numbers.keys() - factors
  if not weights:  # layers of Transformer Engine do not say what their variables are
    return TokenFlops()
  has_head = any(name.startswith(_HEAD) for name in named(boxed))
  is_trained = any(name.startswith(_HEAD if has_head else _EMBEDDING) for name in trained)
  return TokenFlops(
    weights=sum(flops[name] for name in weights) / sum(numbers[name] for name in weights),
    head=2.0 * (1 + (first <= layers) + is_trained),
    passed=1 - min(max(first, 0), layers) / layers,
    factors=sum(flops[name] for name in factors),
  )


def _numbers(boxed: PyTree, active: float) -> dict[str, float]:
  """Returns how many numbers of each weight of the layers a token is multiplied with, by name."""
  found: dict[str, float] = {}
  for name, box in named(boxed).items():
    if not is_box(box) or name.startswith((*_TABLES, f'{REFERENCE}/')):
      continue
    if is_never_trained(name):  # an indexer, which is counted with attention
      continue
    if is_quantized(box):  # in several arrays
      found[name.rpartition('/')[0]] = float(num_parameters(box))
      continue
    dims = dims_of(box)
    if dims.inputs and dims.outputs:
      found[name] = num_parameters(box) * (active if 'experts' in dims.names else 1.0)
  return found


def _place(name: str, layers: int) -> int:
  """Returns the layer of a variable; −1: before all layers, `layers` or more: behind them."""
  if found := _LAYER.match(name):
    return int(found[1])
  if name.startswith(_BEHIND):
    return layers + name.startswith(_HEAD)
  return 0 if name.startswith('transformer/') else -1
