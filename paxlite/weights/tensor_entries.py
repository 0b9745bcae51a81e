"""A tensor of a published model, the variable that it becomes, and the order of its elements.

The transforms return views, so that a tensor is never copied as one array on its way (see
variables.blocks).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from paxlite.experiments.language_model import LanguageModel

Transform = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of a published model, and the variable of paxlite that it becomes."""

  theirs: str  # name of the tensor
  shape: tuple[int, ...]  # shape of the tensor
  ours: str  # name of the variable
  our_shape: tuple[int, ...]  # shape of the variable
  # returns a view of the tensor with its elements in the order of the variable's
  to_ours: Transform
  to_theirs: Transform  # the reverse of to_ours, for a variable in its own shape
  # index of the tensor in the first dimension of a variable that combines queries, keys and values,
  # or experts; None: the tensor is the entire variable
  part: int | None = None
  # Returns the part of the tensor that becomes the variable, as a view. Entries of the same tensor
  # follow each other, or have other entries of that kind alone between them.
  view: Transform = lambda x: x
  # whether the tensor repeats another one, which becomes the variable; it may be missing
  is_copy: bool = False
  dtype: str = ''  # the dtype of the tensor, if it is not that of other tensors: an integer's name


def to_halves(x: np.ndarray, axis: int) -> np.ndarray:
  """Reorders interleaved rotary pairs (2i, 2i+1) as (i, i + H/2).

  Dimension `axis`, H, becomes [2, H/2].
  """
  shape = (*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
  return x.reshape(shape).swapaxes(axis, axis + 1)


def to_pairs(x: np.ndarray, axis: int) -> np.ndarray:
  """Reverses to_halves: dimension `axis`, H, becomes [H/2, 2]."""
  shape = (*x.shape[:axis], 2, x.shape[axis] // 2, *x.shape[axis + 1 :])
  return x.reshape(shape).swapaxes(axis, axis + 1)


whole: Transform = lambda x: x
swapped: Transform = lambda x: x.swapaxes(1, 2)
_Regrouping = Callable[[np.ndarray, int], np.ndarray]
# by the layout of rotary pairs that the experiment has; none if it has no rotary positions
_TO_OURS: dict[str | None, _Regrouping] = {'interleaved': to_pairs, 'half': to_halves}
_TO_THEIRS: dict[str | None, _Regrouping] = {'interleaved': to_halves, 'half': to_pairs}


def of_heads(heads: int, part: int) -> Transform:
  """Returns the view of queries (0), keys (1) or values (2) where a head has all three together."""
  return lambda x: x.reshape(heads, 3, -1, *x.shape[1:])[:, part]


def norm_entries(e: LanguageModel, theirs: str, ours: str, dims: int = 0) -> list[Entry]:
  """Returns the entries of a norm of activations, or of `dims` dimensions."""
  shape = (dims or e.MODEL_DIMS,)
  scale = same(theirs, shape, f'{ours}/scale')
  if e.NORM_CLS != 'LayerNorm':
    return [scale]
  return [scale, same(bias_of(theirs), shape, f'{ours}/bias')]


def bias_of(weight: str) -> str:
  """Returns the name of the bias that belongs to a weight."""
  return weight.removesuffix('weight') + 'bias'


def rows_of(rows: slice) -> Transform:
  return lambda x: x[rows]


def of_pairs(heads: int, part: int) -> Transform:
  """Returns one of the two parts of each head, [heads·2·H, D] to [heads, H, D]."""
  return lambda x: x.reshape(heads, 2, -1, x.shape[-1])[:, part]


def columns_of(columns: slice) -> Transform:
  return lambda x: x[:, columns]


def bias_transforms(heads: int, ours: str | None) -> tuple[Transform, Transform]:
  """Returns the transforms of head_transforms for a vector, [heads·H] → [heads, H] and back."""
  into = _TO_OURS.get(ours)
  out_of = _TO_THEIRS.get(ours)
  split = lambda x: x.reshape(heads, -1)
  return (
    lambda x: split(x) if into is None else into(split(x), 1),
    lambda b: split(b) if out_of is None else out_of(split(b), 1),
  )


def same(
  theirs: str, shape: tuple[int, ...], ours: str, our_shape: tuple[int, ...] | None = None
) -> Entry:
  """Returns the entry of a tensor whose elements have the same order in the variable."""
  return Entry(theirs, shape, ours, our_shape or shape, whole, whole)


def transposed(theirs: str, shape: tuple[int, ...], ours: str) -> Entry:
  return Entry(theirs, shape, ours, shape[::-1], np.transpose, np.transpose)


def head_transforms(heads: int, head_dim: int, ours: str | None) -> tuple[Transform, Transform]:
  """Returns the transforms [heads·H, D] → [D, heads, H] and back.

  They convert rotary pairs to layout `ours` and back, unless `ours` is None.
  """
  into = _TO_OURS.get(ours)
  out_of = _TO_THEIRS.get(ours)

  def to_ours(x: np.ndarray) -> np.ndarray:
    x = x.reshape(heads, head_dim, -1)
    x = x if into is None else into(x, 1)
    return np.moveaxis(x, -1, 0)

  def to_theirs(w: np.ndarray) -> np.ndarray:
    w = np.moveaxis(w, 0, -1)
    return w if out_of is None else out_of(w, 1)

  return to_ours, to_theirs
