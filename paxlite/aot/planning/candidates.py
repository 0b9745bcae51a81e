"""The candidates of a search: a mesh, a batch, and a value for every choice."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paxlite.aot.planning import choices
from paxlite.aot.planning.layouts import Layout, layouts, own_layout
from paxlite.aot.planning.machine import Machine
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.parallel import partitioning


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run an experiment.

  Attributes:
    layout: The mesh.
    rows: Rows of a batch of all devices.
    microbatches: Parts of a batch.
    values: The values of choices.CHOICES.
  """

  layout: Layout
  rows: int
  microbatches: int
  values: Mapping[str, object] = dataclasses.field(hash=False)

  @property
  def attributes(self) -> dict[str, object]:
    """The attributes with which an experiment runs in this way."""
    devices = 1
    for size in self.layout.sizes.values():
      devices *= size
    batch = {'PERCORE_BATCH_SIZE': self.rows / devices, 'NUM_MICROBATCHES': self.microbatches}
    return {**self.layout.values, **batch, **choices.attributes(self.values)}

  def of(self, experiment: LanguageModel) -> LanguageModel:
    """Returns the experiment with these attributes; UserError if it refuses them."""
    made = experiment.replaced(**self.attributes)
    made.validate()
    return made

  def __str__(self) -> str:
    parts = [str(self.layout), f'{self.rows} rows']
    if self.microbatches > 1:
      parts.append(f'in {self.microbatches} parts')
    names = {
      'NUM_LOSS_CHUNKS': 'loss chunks',
      'ATTENTION_BLOCK_SIZE': 'blocks of',
      'NUM_PIPELINE_REPEATS': 'repeats',
    }
    for name, value in self.values.items():
      if name == 'CHECKPOINT_POLICY':
        parts.append(str(value))
      elif name == 'USE_REPEATED_LAYER':
        parts.append('repeated' if value else 'unrolled')
      elif name in names and value not in (0, 1):
        parts.append(f'{names[name]} {value}')
      elif isinstance(value, str) and value != 'off':
        parts.append(f'{name} {value}')
      elif name not in names and value not in (0, '', 'off', (), []):
        parts.append(name)
    return ', '.join(parts)


@dataclasses.dataclass(frozen=True)
class Space:
  """The candidates of an experiment on a machine.

  Attributes:
    experiment: The experiment, validated, with the user's values.
    machine: The machine.
    fixed: Attributes that stay as the experiment has them.
    tried: Attributes of choices that the user allows to try.
    global_batch: Rows of a batch of all devices; None tries several.
    values: Combinations of values of the choices; None for all.
  """

  experiment: LanguageModel
  machine: Machine
  fixed: frozenset[str] = frozenset()
  tried: frozenset[str] = frozenset()
  global_batch: int | None = None
  values: tuple[Mapping[str, object], ...] | None = None

  @property
  def layouts(self) -> list[Layout]:
    """The meshes to try.

    Raises:
      UserError: The experiment's mesh is to be kept and is not that of the machine.
    """
    if self.fixed.isdisjoint(choices.MESH):
      return layouts(self.experiment, self.machine)
    e, devices = self.experiment, self.machine.devices
    if e.num_devices != devices:
      raise UserError(
        f'ICI_MESH_SHAPE={e.ICI_MESH_SHAPE} × DCN_MESH_SHAPE={e.DCN_MESH_SHAPE} is a mesh of '
        f'{e.num_devices} devices, and {self.machine.name} has {devices}: leave it out'
      )
    return [own_layout(e)]

  def __iter__(self) -> Iterator[Candidate]:
    combinations: Sequence[Mapping[str, object]] = self.values or choices.combinations(
      self.experiment, self.machine, self.fixed, self.tried
    )
    own_repeats = self.experiment.values().get('NUM_PIPELINE_REPEATS', 1)
    for layout in self.layouts:
      sizes = layout.sizes
      laid_out = self.experiment.replaced(**layout.values)
      shards = partitioning.num_shards(sizes, laid_out.rules, 'batch')
      stages = sizes.get('stage', 1)
      layers = choices.num_units(self.experiment) // stages
      for batch in choices.batches(
        self.experiment, self.machine.devices, shards, self.fixed, self.global_batch, stages
      ):
        rows = round(batch['PERCORE_BATCH_SIZE'] * self.machine.devices)
        for values in combinations:
          parts = batch['NUM_MICROBATCHES']
          if choices.are_possible(values, own_repeats, stages, layers, parts):
            yield Candidate(layout, rows, parts, values)
