"""Experiments that only -m benchmarks.gpu has: GLaM's stacks without experts."""

from typing import Any

import fiddle as fdl

from paxlite.experiments.glam import GLaM64B64E, GLaM126M64E
from paxlite.experiments.parts.experts import MixtureOfExperts


class Dense(MixtureOfExperts):
  """A stack in which dense blocks replace the blocks with experts."""

  def layer(self) -> fdl.Partial:
    return self.block()

  @property
  def blocks_per_layer(self) -> int:
    return 1

  def has_experts(self, block: int) -> bool:
    return False

  @property
  def model_values(self) -> tuple[dict[str, Any], dict[str, Any]]:
    return super(MixtureOfExperts, self).model_values


class DenseGLaM126M(Dense, GLaM126M64E):
  """All blocks are GLaM126M64E's dense ones."""


class DenseGLaM64B(Dense, GLaM64B64E):
  """All blocks are GLaM64B64E's dense ones."""
