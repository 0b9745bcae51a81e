"""The lines of a TPU's torus that a mesh axis goes through."""

import functools
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh


@functools.cache  # each product with a weight asks
def lines(mesh: Mesh, axis: str) -> tuple[int, ...]:
  """Returns the sizes of the lines that devices along a mesh axis form, the outermost first.

  256 devices on a torus of 16 × 16 are 16 lines of 16 neighbors: (16, 16). Devices that form no
  rectangle of such lines are taken as one line, as are all devices but TPUs.

  Args:
    axis: The name of one of its axes.
  """
  devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
  n = devices.shape[-1]
  if any(d.platform != 'tpu' for d in devices.flat):  # GPUs may have coordinates, too
    return (n,)
  sizes = {_rectangle([d.coords for d in row]) for row in devices.reshape(-1, n)}
  return sizes.pop() if len(sizes) == 1 else (n,)


def _rectangle(coords: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """Returns the sizes of the lines that coordinates form."""
  left = np.array(coords)
  if len(np.unique(left, axis=0)) < len(left):  # of several slices, or two cores of a chip
    return (len(left),)
  sizes: list[int] = []
  while len(left) > 1:
    moved = left != left[0]
    leaves = (moved & ~moved[1]).any(1)  # the line through the first two devices
    size = int(leaves.argmax()) if leaves.any() else len(left)
    if moved[1].sum() > 1 or len(left) % size:
      return (len(coords),)
    rows = left.reshape(-1, size, left.shape[-1])
    steps = rows - rows[:, :1]
    if (steps != steps[0]).any():
      return (len(coords),)
    sizes.insert(0, size)
    left = rows[:, 0]
  return tuple(sizes) or (1,)
