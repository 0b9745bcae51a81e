"""The roles of a variable's dimensions, for optimizers that treat weights as matrices.

A layer declares a weight with the einsum that multiplies it: partitioning.param. This is the only
source; an optimizer asks `weight_dims`, in the init and the update of its transformation.
"""

import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import jax
from flax import linen as nn
from flax import struct
from optax.contrib import MuonDimensionNumbers

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import REPEATED, path_name

# Logical axes along which there are separate weights, and of tables with a row for each token.
_STACKED = ('layers', 'experts', 'qkv')
_ROWS = ('vocab', 'positions')


@dataclasses.dataclass(frozen=True)
class WeightDims:
  """The roles of a variable's dimensions, as indices from 0."""

  # those along which there are separate weights: layers, experts, and the queries, keys and values
  # of one variable
  stacked: tuple[int, ...]
  # those that the product with the activations sums over; () if there is no product, as for norms
  # and biases
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]  # all others, which the product makes
  heads: tuple[int, ...] = ()  # those of `inputs` or `outputs` that count attention heads
  # whether it has a row for each token id or position: embeddings and the output head
  is_table: bool = False
  # the logical axis of each dimension; () if the layer has declared none
  names: tuple[str | None, ...] = ()

  @property
  def is_matrix(self) -> bool:
    """Whether it holds matrices [inputs, outputs] that an optimizer may treat as such."""
    return bool(self.inputs and self.outputs) and not self.is_table


@struct.dataclass
class Weight(nn.LogicallyPartitioned):
  """A box around a parameter with its logical axes and the einsum of which it is a factor."""

  equation: str = struct.field(default='', pytree_node=False)


def boxed(
  init: Callable[..., jax.Array], axes: Sequence[str | None], equation: str
) -> Callable[..., Weight]:
  """Returns an initializer whose result is in a box."""
  return lambda *args: Weight(init(*args), tuple(axes), equation=equation)


def dims_of(box: nn.LogicallyPartitioned) -> WeightDims:
  """Returns what the dimensions of a boxed parameter are.

  A dimension of the weight that the activations have too is summed over, or, if the result has it
  as well, stacked. The layers of a repeated stack are dimensions before those of the equation.
  """
  names = box.names
  equation = getattr(box, 'equation', '') or ',->'
  read, own, made = equation.replace('->', ',').split(',')
  letters = own.rjust(len(names))
  is_shared = lambda i: letters[i] in read and letters[i] in made
  stacked = [i for i, name in enumerate(names) if name in _STACKED or is_shared(i)]
  inputs = [i for i in range(len(names)) if letters[i] in read and i not in stacked]
  return WeightDims(
    tuple(stacked),
    tuple(inputs),
    tuple(i for i in range(len(names)) if i not in (*stacked, *inputs)),
    tuple(i for i, name in enumerate(names) if name in ('heads', 'kv_heads'))
    if 'head_dim' in names
    else (),
    any(name in _ROWS for name in names),
    tuple(names),
  )


_declared = contextvars.ContextVar[Callable[[], PyTree]]('paxlite_declared')


@contextlib.contextmanager
def declared(boxed_params: Callable[[], PyTree]) -> Iterator[None]:
  """A context in which `weight_dims` knows all parameters.

  Args:
    boxed_params: Returns the parameters, or their shapes, boxed as layers declare them.
  """
  token = _declared.set(functools.cache(boxed_params))
  try:
    yield
  finally:
    _declared.reset(token)


_one_layer = contextvars.ContextVar[bool]('paxlite_one_layer', default=False)


@contextlib.contextmanager
def of_one_layer() -> Iterator[None]:
  """A context in which arrays of a repeated stack are those of one layer: see optim.per_layer."""
  token = _one_layer.set(True)
  try:
    yield
  finally:
    _one_layer.reset(token)


def layer_dims(name: str) -> int:
  """Returns 1 if the first dimension of a variable of this name is that of layers; otherwise 0."""
  return int(REPEATED in name.split('/') and not _one_layer.get())


def weight_dims(params: PyTree) -> PyTree:
  """Returns the WeightDims of each variable, in a tree like `params`.

  It is for the init and the update of an optax transformation, which sees the arrays of one layer
  of a repeated stack. Variables that a layer has declared without `partitioning.param` have no
  inputs.

  Args:
    params: Parameters, or gradients or moments in a tree with the same names. Some may be left out.
  """
  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  leaves = jax.tree_util.tree_leaves_with_path(_declared.get(dict)(), is_leaf=is_box)
  boxes = {path_name(path): x for path, x in leaves if is_box(x)}
  if not boxes:
    raise UserError(
      "weight_dims was called outside an optimizer's init and update, or no parameter is declared "
      'by paxlite.parallel.partitioning.param'
    )

  def one(path: Sequence[object], x: jax.Array) -> WeightDims:
    name = path_name(path)
    layers, words = layer_dims(name), name.split('/')
    if _one_layer.get() and REPEATED in words:  # which may be one of several, by its number
      name = re.sub(rf'(^|/){REPEATED}/\d+/', rf'\1{REPEATED}/', name)
      if name in boxes:
        return dims_of(boxes[name].replace(names=boxes[name].names[1:]))
    if name in boxes:
      return dims_of(boxes[name])
    return WeightDims(tuple(range(layers)), (), tuple(range(layers, x.ndim)))

  return jax.tree_util.tree_map_with_path(one, params)


def muon_dims(params: PyTree) -> PyTree:
  """Returns what optax.contrib.muon asks of matrices; None for variables that Adam is to train."""
  one = lambda d: MuonDimensionNumbers(d.inputs, d.outputs) if d.is_matrix else None
  return jax.tree.map(one, weight_dims(params))
