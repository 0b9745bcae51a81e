"""Candidates as vectors of numbers, so that similar candidates are close to each other."""

import math
from collections.abc import Sequence

import numpy as np

from paxlite.aot.planning.candidates import Candidate
from paxlite.parallel.mesh import KNOWN_AXES

_APART = 1.5  # the distance between two values that are not numbers, in doublings


class Features:
  """Numbers that describe candidates, and which of them belong to one choice.

  Attributes:
    groups: The numbers of the mesh, of the rows, of the microbatches, and of each choice.
  """

  def __init__(self, candidates: Sequence[Candidate]):
    """Takes the values that occur in these candidates."""
    self._words: dict[str, list[str]] = {}
    self._numeric: set[str] = set()
    for name in candidates[0].values if candidates else ():
      values = [c.values[name] for c in candidates]
      if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        self._numeric.add(name)
      else:
        self._words[name] = sorted({str(v) for v in values})
    mesh = 2 * len(KNOWN_AXES)
    self.groups = [slice(0, mesh), slice(mesh, mesh + 1), slice(mesh + 1, mesh + 2)]
    for name in candidates[0].values if candidates else ():
      begin = self.groups[-1].stop
      size = 1 if name in self._numeric else len(self._words[name])
      self.groups.append(slice(begin, begin + size))

  def of(self, candidates: Sequence[Candidate]) -> np.ndarray:
    """Returns the numbers of candidates, [candidates, numbers]."""
    return np.array([self._one(c) for c in candidates], float)

  def _one(self, c: Candidate) -> list[float]:
    numbers = []
    for sizes in (c.layout.near, c.layout.far):
      by_axis = dict(zip(c.layout.axes, sizes, strict=True))
      numbers += [math.log2(by_axis.get(axis, 1)) for axis in KNOWN_AXES]
    numbers += [math.log2(c.rows), math.log2(c.microbatches)]
    for name, value in c.values.items():
      if name in self._numeric:
        assert isinstance(value, int | float)
        numbers.append(math.log2(1 + value))
      else:
        numbers += [_APART / 2 * (str(value) == word) for word in self._words[name]]
    return numbers
