"""The device mesh: its axes, its shape, and the positions of the devices."""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from paxlite.core import shell
from paxlite.core.errors import UserError

MESH_AXES = ('replica', 'data', 'mdl')


KNOWN_AXES = ('stage', 'replica', 'data', 'expert', 'context', 'mdl')


def make_mesh(
  ici: Sequence[int],
  dcn: Sequence[int],
  axes: Sequence[str] = MESH_AXES,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """The device mesh of shape `ici` × `dcn` over `axes`.

  Raises UserError if the shapes do not fit the axes, or their product is not the number of devices.

  Args:
    ici: Devices per axis within a slice or host (ICI, NVLink).
    dcn: Copies of the `ici` mesh per axis, across slices or hosts (DCN).
    axes: Names from KNOWN_AXES, in the order of both shapes.
    devices: The devices of the mesh; None for all that are present.
  """
  devices = jax.devices() if devices is None else devices
  check_mesh_shape(ici, dcn, axes, len(devices))
  return Mesh(
    device_order(ici, _full(dcn, len(axes)), devices),
    tuple(axes),
    axis_types=(AxisType.Auto,) * len(axes),
  )


def device_order(
  ici: Sequence[int], dcn: Sequence[int], devices: Sequence[jax.Device]
) -> np.ndarray:
  """The devices as an array of shape ici × dcn. Each copy over DCN is from one slice or host.

  Raises UserError if the devices are TPUs, and `dcn` is for another number of slices.
  """
  granules = _granules(devices, math.prod(dcn))
  # Within a slice of TPUs, JAX knows which neighbors make a good ring. Elsewhere all orders are
  # equally good.
  if devices[0].platform == 'tpu':
    from jax.experimental import mesh_utils

    slices = len({_slice(d) for d in devices})
    if slices != math.prod(dcn):
      raise UserError(
        f'DCN_MESH_SHAPE={list(dcn)} is for {math.prod(dcn)} TPU slices, but the devices are in '
        f'{slices}: its product must be {slices}'
      )
    make = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    blocks = [make(ici, granule) for granule in granules]
  else:
    blocks = [np.reshape(np.array(granule, dtype=object), ici) for granule in granules]
  # [dcn axes…, ici axes…] to [dcn 0, ici 0, dcn 1, ici 1, …]
  n = len(ici)
  stacked = np.reshape(np.stack(blocks), [*dcn, *ici])
  paired = stacked.transpose([i + j * n for i in range(n) for j in (0, 1)])
  return paired.reshape(mesh_shape(ici, dcn))


def _granules(devices: Sequence[jax.Device], count: int) -> list[list[jax.Device]]:
  """`count` groups of devices that are near each other: slices, else processes, else neighbors."""
  ordered = sorted(devices, key=lambda d: (_slice(d), d.process_index, d.id))
  for key in (_slice, lambda d: d.process_index):
    groups: dict[int, list[jax.Device]] = {}
    for d in ordered:
      groups.setdefault(key(d), []).append(d)
    if len(groups) == count and len({len(g) for g in groups.values()}) == 1:
      return [groups[k] for k in sorted(groups)]
  # for example with one process per GPU: processes with neighboring numbers share a host
  size = len(ordered) // count
  return [ordered[i * size : (i + 1) * size] for i in range(count)]


def _slice(device: jax.Device) -> int:
  return getattr(device, 'slice_index', None) or 0


def mesh_shape(ici: Sequence[int], dcn: Sequence[int]) -> tuple[int, ...]:
  """The number of devices per axis; a `dcn` of ones may have any length."""
  return tuple(i * d for i, d in zip(ici, _full(dcn, len(ici)), strict=True))


def _full(dcn: Sequence[int], axes: int) -> Sequence[int]:
  return [1] * axes if all(d == 1 for d in dcn) else dcn


def check_mesh_shape(
  ici: Sequence[int], dcn: Sequence[int], axes: Sequence[str], devices: int | None
) -> None:
  """Raises UserError unless both shapes fit `axes` and, if given, the number of devices."""
  unknown = [a for a in axes if a not in KNOWN_AXES]
  if unknown or len(set(axes)) < len(axes) or not set(MESH_AXES) <= set(axes):
    raise UserError(
      f'MESH_AXES={list(axes)} must hold {", ".join(MESH_AXES)} and may hold '
      f'{", ".join(a for a in KNOWN_AXES if a not in MESH_AXES)}, each once'
    )
  for name, shape in (('ICI_MESH_SHAPE', ici), ('DCN_MESH_SHAPE', _full(dcn, len(axes)))):
    if len(shape) != len(axes) or min(shape) < 1:
      raise UserError(
        f'{name}={list(shape)} must have {len(axes)} positive sizes, for {", ".join(axes)}'
      )
  product = math.prod(mesh_shape(ici, dcn))
  if devices is not None and product != devices:
    all_data = [devices if a == 'data' else 1 for a in axes]
    here = shell.flags({'ICI_MESH_SHAPE': all_data, 'DCN_MESH_SHAPE': [1] * len(axes)})
    raise UserError(
      f'ICI_MESH_SHAPE={list(ici)} × DCN_MESH_SHAPE={list(dcn)} needs {product} devices, but '
      f'{devices} {"is" if devices == 1 else "are"} present. To use what is here: {here}'
    )
