"""Values of a frozen model that a run computes once, before training, and keeps in its folder."""

import abc
from collections.abc import Mapping
from typing import Self

import jax

from paxlite.data.base import RowArray
from paxlite.experiments.parts.objective import Objective
from paxlite.losses.outputs import Outputs


class StoredValues(Objective):
  """An objective with losses that may read a frozen model's stored outputs for a sequence.

  See finetuning/reference_values.py, which computes and keeps it.
  """

  @property
  @abc.abstractmethod
  def stored_arrays(self) -> Mapping[str, RowArray]:
    """The arrays that are computed once, by their names; {} if the model is there in each step."""

  @abc.abstractmethod
  def made_of(self, outputs: Outputs) -> Mapping[str, jax.Array]:
    """Returns these arrays for a batch, [B, T, …].

    Args:
      outputs: What the frozen model makes of the batch.
    """

  @property
  @abc.abstractmethod
  def with_reference(self) -> Self:
    """The same experiment, which has the frozen model in each step, as its reference."""

  @property
  def made_with(self) -> str:
    """The attributes on which `made_of` depends, for a checksum."""
    return ''

  @property
  def further_arrays(self) -> Mapping[str, RowArray]:
    return {**super().further_arrays, **self.stored_arrays}
