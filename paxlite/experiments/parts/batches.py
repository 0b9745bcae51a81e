"""The size of a batch and of its sequences, and whether the mesh can split it."""

import math

from paxlite.config.attribute_kinds import Count, Run, Training, Uint32
from paxlite.core.errors import UserError
from paxlite.experiments.parts.parallelism import Parallelism
from paxlite.parallel import partitioning


class Batches(Parallelism, subject='Batches'):
  """The global batch is PERCORE_BATCH_SIZE × devices, for every mesh. Fractions are allowed."""

  PERCORE_BATCH_SIZE: Run[float] = 1.0  # sequences of a batch per device
  MAX_SEQ_LEN: Training[Count] = 1024  # tokens of a sequence
  PACKED_INPUT: Training[bool] = True  # packs segments into a sequence; none attends to another
  NUM_MICROBATCHES: Run[Count] = 1  # parts of a batch whose gradients are accumulated
  ROWS_PER_EXAMPLE: Training[Count] = 1  # sequences that belong together, such as a pair
  SEED: Training[Uint32] = 1234  # seed of initial values, dropout and the order of the data

  @property
  def packed(self) -> bool:
    """Whether a row of the data may hold several documents."""
    return self.PACKED_INPUT

  @property
  def batch_shards(self) -> int:
    """The number of parts that the rows of a batch are split into."""
    return partitioning.num_shards(self.mesh_sizes, self.rules, 'batch')

  @property
  def batch_size(self) -> int:
    """The number of rows in a global batch."""
    exact = self.PERCORE_BATCH_SIZE * self.num_devices
    return round(exact) if math.isfinite(exact) else 0

  def validate(self) -> None:
    super().validate()
    length_shards = partitioning.num_shards(self.mesh_sizes, self.rules, 'residual_length')
    if self.MAX_SEQ_LEN % length_shards:
      axes = ' × '.join(partitioning.axes_of(self.rules['residual_length']))
      raise UserError(
        f'MAX_SEQ_LEN={self.MAX_SEQ_LEN} is not divisible by {axes} = {length_shards}'
      )
    self.check_batch_size()

  def check_batch_size(self) -> None:
    """Raises UserError if the global batch is not a whole number or cannot be split."""
    exact, batch = self.PERCORE_BATCH_SIZE * self.num_devices, self.batch_size
    where = f'PERCORE_BATCH_SIZE={self.PERCORE_BATCH_SIZE:g} × {self.num_devices} devices'
    if batch < 1 or abs(batch - exact) > 1e-6:
      raise UserError(f'{where} is a global batch of {exact:g}: it must be a whole number ≥ 1')
    shards = self.batch_shards
    parts = {n: getattr(self, n) for n in ('NUM_MICROBATCHES', 'ROWS_PER_EXAMPLE')}
    if batch % (shards * math.prod(parts.values())):
      micro = ''.join(f' × {name}={n}' for name, n in parts.items() if n != 1)
      axes = ' × '.join(partitioning.axes_of(self.rules['batch']))
      raise UserError(
        f'{where} is a global batch of {batch}, not divisible by {axes} = {shards}{micro}'
      )
