"""How large an array is on one device, for any mesh and batch, from the sizes of its dimensions.

A model is traced once with a prime batch size that divides no other size of the model. A dimension
that it divides is therefore one of the batch.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts

_PRIMES = (13, 17, 19, 23, 29, 31, 37)


class Extent(NamedTuple):
  """The dimensions of an array that a mesh or a batch can split.

  Attributes:
    rows: The power of the batch size in the size of the array; 0: it has no batch dimension.
    length: Whether it has the tokens of a row, which the axis context splits.
    width: The size of the dimension that the axis mdl splits if it divides it; 1 is none.
    experts: The number of experts if it is a weight of experts; else 1.
  """

  rows: int = 0
  length: bool = False
  width: int = 1
  experts: int = 1


class Shares(NamedTuple):
  """How much of a traced array one device has.

  Attributes:
    rows: Rows that a device computes at a time, divided by the traced ones.
    context: Size of the mesh axis context.
    mdl: Size of the mesh axis mdl.
    experts: Devices that share the experts.
  """

  rows: float
  context: int
  mdl: int
  experts: int

  def of(self, extent: Extent) -> float:
    """Returns the share of an array that one device has."""
    share = self.rows**extent.rows
    if extent.length:
      share /= self.context
    if extent.width % self.mdl == 0:
      share /= self.mdl
    if extent.experts > 1 and not extent.rows:
      share /= self.experts
    return share


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of a model.

  Attributes:
    rows: Rows of the traced batch.
    length: Tokens of a row.
    widths: Sizes of dimensions that the axis mdl may split: heads, units, vocabulary, width.
    experts: Number of experts; 1 if there are none.
    buffers: The buffers of dropless experts. For each length, how many tokens fill it if experts
      have equal loads. No batch size divides such a length, so buffers are sharded as tokens are.
  """

  rows: int
  length: int
  widths: frozenset[int]
  experts: int
  buffers: Mapping[int, int] = dataclasses.field(default_factory=dict)

  def extent(self, shape: Sequence[int]) -> Extent:
    """Returns the extent of an array of this shape."""
    rows, length, width, experts = 0, False, 1, 1
    for size in (self.buffers.get(n, n) for n in shape):
      while size > 1 and size % self.rows == 0:
        size //= self.rows
        rows += 1
      if not length and size > 1 and size % self.length == 0 and rows:
        length = True
      elif self.experts > 1 and size == self.experts:
        experts = size
      elif width == 1 and size in self.widths:
        width = size
    return Extent(rows, length, width, experts)


def sizes_of(e: LanguageModel) -> Sizes:
  """Returns the sizes of an experiment's model, with a number of rows that divides none of them."""
  widths = {e.NUM_HEADS, e.NUM_KV_HEADS, e.MODEL_DIMS, e.HIDDEN_DIMS, e.VOCAB_SIZE}
  experts = 1
  if isinstance(e, MixtureOfExperts):
    widths.add(e.EXPERT_HIDDEN_DIMS)
    experts = e.NUM_EXPERTS
  widths -= {1}
  heads = e.NUM_HEADS * e.DIMS_PER_HEAD
  # the loss computes the logits in chunks of the vocabulary
  widths |= {-(-e.VOCAB_SIZE // chunks) for chunks in (2, 4, 8, 16, 32)}
  known = {*widths, heads, e.MAX_SEQ_LEN, e.DIMS_PER_HEAD}
  rows = next((p for p in _PRIMES if all(size % p for size in known if size > 1)), 41)
  return Sizes(rows, e.MAX_SEQ_LEN, frozenset({*widths, heads}), experts)


class Amounts(dict[Extent, float]):
  """Bytes, or other amounts, by extent."""

  def add(self, extent: Extent, amount: float) -> None:
    self[extent] = self.get(extent, 0.0) + amount

  def on_a_device(self, shares: Shares) -> float:
    """Returns the amount that one device has."""
    return sum(amount * shares.of(extent) for extent, amount in self.items())

  def minus(self, other: 'Amounts') -> 'Amounts':
    """Returns the difference of two amounts by extent, as far as it is positive."""
    found = Amounts()
    for extent, amount in self.items():
      if (left := amount - other.get(extent, 0.0)) > 0:
        found[extent] = left
    return found

  def times(self, factor: float) -> 'Amounts':
    return Amounts({extent: amount * factor for extent, amount in self.items()})


def total(parts: Iterable[Amounts]) -> Amounts:
  """Returns the sum of several amounts."""
  return functools.reduce(_plus, parts, Amounts())


def _plus(one: Amounts, other: Amounts) -> Amounts:
  found = Amounts(one)
  for extent, amount in other.items():
    found.add(extent, amount)
  return found
