"""The meshes of a machine that are worth a look."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from paxlite.aot.planning.machine import Machine
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.parallel.mesh import MESH_AXES

_Test = Callable[[int], bool]  # whether an axis can have a size


class Layout(NamedTuple):
  """A mesh.

  Attributes:
    axes: The mesh axes.
    near: Their sizes within a host or slice.
    far: Their sizes between hosts or slices.
  """

  axes: tuple[str, ...]
  near: tuple[int, ...]
  far: tuple[int, ...]

  @property
  def values(self) -> dict[str, object]:
    """The attributes of an experiment that make this mesh."""
    return {
      'MESH_AXES': list(self.axes),
      'ICI_MESH_SHAPE': list(self.near),
      'DCN_MESH_SHAPE': list(self.far),
    }

  @property
  def sizes(self) -> dict[str, int]:
    return {a: n * f for a, n, f in zip(self.axes, self.near, self.far, strict=True)}

  def __str__(self) -> str:
    parts = []
    for axis, near, far in zip(self.axes, self.near, self.far, strict=True):
      if near * far > 1:
        parts.append(f'{axis} {near}' if far == 1 else f'{axis} {near}·{far}')
    return ' × '.join(parts) or 'one device'


# axes that send the activations of every layer stay within a host or slice
_WITHIN = ('replica', 'data', 'mdl', 'expert', 'context')
_BETWEEN = ('replica', 'data', 'stage')


def layouts(e: LanguageModel, machine: Machine) -> list[Layout]:
  """Returns all meshes of the machine whose axes the model can use, and the experiment's own."""
  usable = _usable(e)
  within = [a for a in _WITHIN if a in usable]
  # with one host or slice, stages are within it
  between = [a for a in _BETWEEN if a in usable]
  if machine.hosts == 1 and 'stage' in usable:
    within.append('stage')
  found: dict[tuple[object, ...], Layout] = {}
  for near in _splits(machine.near, within):
    for far in _splits(machine.hosts, between):
      if layout := _layout(near, far, usable):
        found.setdefault((layout.near, layout.far, layout.axes), layout)
  own = own_layout(e)
  if e.num_devices == machine.devices:
    found.setdefault((own.near, own.far, own.axes), own)
  return list(found.values())


def own_layout(e: LanguageModel) -> Layout:
  """Returns the mesh of the experiment itself."""
  ones = (1,) * len(e.MESH_AXES)
  far = ones if all(n == 1 for n in e.DCN_MESH_SHAPE) else tuple(e.DCN_MESH_SHAPE)
  return Layout(tuple(e.MESH_AXES), tuple(e.ICI_MESH_SHAPE), far)


def _usable(e: LanguageModel) -> dict[str, _Test]:
  """Returns the axes that the model can use, with the test that a size must pass."""
  always = lambda size: True
  found: dict[str, _Test] = {'replica': always, 'data': always}
  heads = math.gcd(e.NUM_HEADS, e.HIDDEN_DIMS)
  found['mdl'] = lambda size: heads % size == 0
  if e.MAX_SEQ_LEN >= _LONG:
    found['context'] = lambda size: e.MAX_SEQ_LEN % (128 * size) == 0
  if isinstance(e, MixtureOfExperts) and e.num_expert_blocks:
    experts = e.NUM_EXPERTS
    found['expert'] = lambda size: experts % size == 0
  units, rest = divmod(e.NUM_LAYERS - e.num_first_blocks, e.blocks_per_layer)
  if not rest and not e.num_first_blocks:
    found['stage'] = lambda size: units % size == 0
  return found


_LONG = 8192  # tokens of a row from which splitting rows can pay


def _layout(
  near: Mapping[str, int], far: Mapping[str, int], usable: Mapping[str, _Test]
) -> Layout | None:
  sizes = {a: near.get(a, 1) * far.get(a, 1) for a in {*near, *far}}
  if any(size > 1 and not usable[a](size) for a, size in sizes.items()):
    return None
  if sizes.get('stage', 1) > 1 and max(sizes.get('context', 1), sizes.get('expert', 1)) > 1:
    return None
  axes = [
    a for a in ('stage', *MESH_AXES, 'expert', 'context') if a in MESH_AXES or sizes.get(a, 1) > 1
  ]
  return Layout(
    tuple(axes), tuple(near.get(a, 1) for a in axes), tuple(far.get(a, 1) for a in axes)
  )


def _splits(devices: int, axes: list[str]) -> Iterator[dict[str, int]]:
  """Yields every way to write a number of devices as a product over axes."""
  if len(axes) == 1:
    yield {axes[0]: devices}
    return
  divisors = [d for d in range(1, devices + 1) if devices % d == 0]
  for size in divisors:
    for rest in _splits(devices // size, axes[1:]):
      yield {axes[0]: size, **rest}
