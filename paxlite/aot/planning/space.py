"""The candidates of a search: a mesh, a batch, and a value for every attribute to choose.

Each entry of CHOICES is one axis of the search. A new attribute needs one entry.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paxlite.aot.planning.machine import Machine
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.parts.linked_stack import LinkedStack
from paxlite.parallel import partitioning
from paxlite.parallel.mesh import MESH_AXES

Values = Mapping[str, Any]  # of CHOICES

_POLICIES = (
  'SAVE_NOTHING', 'SAVE_ATTENTION', 'SAVE_OUT_PROJ', 'SAVE_QKV_OUT_PROJ_SEPARATE',
  'SAVE_QKV_ATTENTION_OUT_PROJ', 'SAVE_DOT_WITH_NO_BATCH_DIM', 'SAVE_DOT_AND_ATTENTION',
  'SAVE_EVERYTHING',
)  # fmt: skip
_MOST_UNROLLED = 16  # layers: an unrolled stack of many takes TPUs hours to compile
_LONG = 8192  # tokens of a row from which splitting rows can pay
_DOUBLINGS = 7  # each shard of a batch has 1, 2, 4 … 64 rows

# the values to try beside the experiment's own
CHOICES: Mapping[str, Callable[[LanguageModel], Sequence[Any]]] = {
  'CHECKPOINT_POLICY': lambda e: _POLICIES,
  'NUM_LOSS_CHUNKS': lambda e: (1, 4) if e.VOCAB_SIZE < 1 << 17 else (1, 4, 16),
  'USE_REPEATED_LAYER': lambda e: [True, False][: 1 + (e.NUM_LAYERS <= _MOST_UNROLLED)],
}
MESH = ('MESH_AXES', 'ICI_MESH_SHAPE', 'DCN_MESH_SHAPE')
NAMES = (*MESH, 'PERCORE_BATCH_SIZE', 'NUM_MICROBATCHES', *CHOICES)


class Layout(NamedTuple):
  """A mesh: its axes with their sizes within (near) and between (far) hosts or slices."""

  axes: tuple[str, ...]
  near: tuple[int, ...]
  far: tuple[int, ...]

  @property
  def values(self) -> dict[str, list[Any]]:
    """The attributes of an experiment that make this mesh."""
    return dict(zip(MESH, map(list, self), strict=True))

  @property
  def sizes(self) -> dict[str, int]:
    return {a: n * f for a, n, f in zip(*self, strict=True)}

  @property
  def has_experts(self) -> bool:
    """Whether experts are split over devices, to which tokens travel."""
    return self.sizes.get('expert', 1) > 1

  def __str__(self) -> str:
    parts = [
      f'{axis} {near}' if far == 1 else f'{axis} {near}·{far}'
      for axis, near, far in zip(*self, strict=True)
      if near * far > 1
    ]
    return ' × '.join(parts) or 'one device'


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run an experiment, with the rows of a batch of all devices."""

  layout: Layout
  rows: int
  microbatches: int
  values: Values = dataclasses.field(hash=False)

  @property
  def attributes(self) -> dict[str, Any]:
    """The attributes with which an experiment runs in this way."""
    rows = self.rows / math.prod(self.layout.sizes.values())
    batch = {'PERCORE_BATCH_SIZE': rows, 'NUM_MICROBATCHES': self.microbatches}
    return {**self.layout.values, **batch, **self.values}

  def of(self, experiment: LanguageModel) -> LanguageModel:
    """Returns the experiment with these attributes; UserError if it refuses them."""
    made = experiment.replaced(**self.attributes)
    made.validate()
    return made

  def __str__(self) -> str:
    parts = [str(self.layout), f'{self.rows} rows']
    if self.microbatches > 1:
      parts.append(f'in {self.microbatches} parts')
    parts.append(self.values['CHECKPOINT_POLICY'])
    if (chunks := self.values['NUM_LOSS_CHUNKS']) > 1:
      parts.append(f'loss chunks {chunks}')
    return ', '.join([*parts, 'repeated' if self.values['USE_REPEATED_LAYER'] else 'unrolled'])


@dataclasses.dataclass(frozen=True)
class Space:
  """The candidates of an experiment on a machine."""

  experiment: LanguageModel
  machine: Machine
  fixed: frozenset[str] = frozenset()  # attributes that stay as the experiment has them
  global_batch: int | None = None  # rows of a batch of all devices; None tries several
  values: tuple[Values, ...] | None = None  # combinations of values of the choices; None for all

  @property
  def layouts(self) -> list[Layout]:
    """The meshes to try.

    Raises UserError if the experiment's mesh is to be kept and is not that of the machine.
    """
    if self.fixed.isdisjoint(MESH):
      return layouts(self.experiment, self.machine)
    e, devices = self.experiment, self.machine.devices
    if e.num_devices != devices:
      raise UserError(
        f'ICI_MESH_SHAPE={e.ICI_MESH_SHAPE} × DCN_MESH_SHAPE={e.DCN_MESH_SHAPE} is a mesh of '
        f'{e.num_devices} devices, but {self.machine.name} has {devices}: leave it out'
      )
    return [own_layout(e)]

  def combinations(self) -> Sequence[Values]:
    """Returns the combinations of the values of CHOICES that are worth a look."""
    if self.values is not None:
      return self.values
    e, options = self.experiment, dict[str, list[Any]]()
    for name, others in CHOICES.items():
      tried = [] if name in self.fixed else others(e)
      own = [] if tried and name == 'USE_REPEATED_LAYER' else [getattr(e, name)]
      own = ['SAVE_NOTHING' if value == 'AUTO' else value for value in own]
      options[name] = list(dict.fromkeys([*own, *tried]))
    products = itertools.product(*options.values())
    return [dict(zip(options, values, strict=True)) for values in products]

  def __iter__(self) -> Iterator[Candidate]:
    combinations = self.combinations()
    for layout in self.layouts:
      sizes = layout.sizes
      rules = self.experiment.replaced(**layout.values).rules
      shards, stages = partitioning.num_shards(sizes, rules, 'batch'), sizes.get('stage', 1)
      for rows, parts in self.batches(shards, stages):
        for values in combinations:
          if stages == 1 or values['USE_REPEATED_LAYER']:
            yield Candidate(layout, rows, parts, values)

  def batches(self, shards: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yields (rows, microbatches) that a mesh with `stages` stages can hold.

    Its devices split the rows of a batch into `shards` parts.
    """
    e, given = self.experiment, self.global_batch
    sizes = [given] if given else [shards * 2**i for i in range(_DOUBLINGS)]
    if 'PERCORE_BATCH_SIZE' in self.fixed and not given:
      sizes = [round(e.PERCORE_BATCH_SIZE * self.machine.devices)]
    parts = [1, 2, 4, 8, 16, 32]
    if 'NUM_MICROBATCHES' in self.fixed:
      parts = [e.NUM_MICROBATCHES]
    elif len(sizes) > 1 and stages == 1:
      parts = [1]  # microbatches save memory for a larger batch, which is always faster by token
    for rows, part in itertools.product(sizes, parts):
      if rows % (shards * part) == 0 and (stages == 1 or part >= stages or part == parts[-1]):
        yield rows, part


def refusal(e: Experiment) -> str | None:
  """Returns why the planner does not take an experiment; None if it does."""
  if not isinstance(e, LanguageModel):
    return f'{type(e).__name__} is not a language model, which plans need'
  if e.ROWS_PER_EXAMPLE > 1:
    return f'ROWS_PER_EXAMPLE={e.ROWS_PER_EXAMPLE}: plans support only losses of single sequences'
  if isinstance(e, LinkedStack) and e.has_links:
    return f'{e.links}: plans support only stacks of repeated layers'
  return None


def layouts(e: LanguageModel, machine: Machine) -> list[Layout]:
  """Returns all meshes of the machine whose axes the model can use, and the experiment's own."""
  heads, hosts = math.gcd(e.NUM_HEADS, e.HIDDEN_DIMS), machine.devices // machine.near
  # the axes that the model can use, and whether one can have a size
  usable: dict[str, Callable[[int], bool]] = {'replica': lambda size: True}
  usable |= {'data': lambda size: True, 'mdl': lambda size: heads % size == 0}
  if isinstance(e, MixtureOfExperts) and e.num_expert_blocks:
    usable['expert'] = lambda size: e.NUM_EXPERTS % size == 0
  if e.MAX_SEQ_LEN >= _LONG:
    usable['context'] = lambda size: e.MAX_SEQ_LEN % (128 * size) == 0
  units, rest = divmod(e.NUM_LAYERS - e.num_first_blocks, e.blocks_per_layer)
  # axes that send the activations of every layer stay within a host or slice
  within, between = list(usable), ['replica', 'data']
  if not rest and not e.num_first_blocks:
    usable['stage'] = lambda size: (
      size == 1 or (units % size == 0 and units // size % e.NUM_PIPELINE_REPEATS == 0)
    )
    (within if hosts == 1 else between).append('stage')
  found = list[Layout]()
  for near, far in itertools.product(_splits(machine.near, within), _splits(hosts, between)):
    sizes = {a: near.get(a, 1) * far.get(a, 1) for a in usable}
    if not all(usable[a](size) for a, size in sizes.items()):
      continue
    if sizes.get('stage', 1) > 1 and max(sizes.get('context', 1), sizes.get('expert', 1)) > 1:
      continue
    order = ('stage', *MESH_AXES, 'expert', 'context')
    axes = tuple(a for a in order if a in MESH_AXES or sizes.get(a, 1) > 1)
    found.append(Layout(axes, *(tuple(of.get(a, 1) for a in axes) for of in (near, far))))
  if e.num_devices == machine.devices:
    found.append(own_layout(e))
  return list(dict.fromkeys(found))


def own_layout(e: LanguageModel) -> Layout:
  """Returns the mesh of the experiment itself."""
  ones = (1,) * len(e.MESH_AXES)
  far = ones if all(n == 1 for n in e.DCN_MESH_SHAPE) else tuple(e.DCN_MESH_SHAPE)
  return Layout(tuple(e.MESH_AXES), tuple(e.ICI_MESH_SHAPE), far)


def _splits(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
  """Yields every way to write a number of devices as a product over axes."""
  if len(axes) == 1:
    yield {axes[0]: devices}
    return
  for size in (d for d in range(1, devices + 1) if devices % d == 0):
    for rest in _splits(devices // size, axes[1:]):
      yield {axes[0]: size, **rest}


def num_units(e: LanguageModel) -> int:
  """Returns how often an experiment's stack repeats its unit of blocks."""
  return max((e.NUM_LAYERS - e.num_first_blocks) // e.blocks_per_layer, 1)
