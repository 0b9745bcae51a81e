"""What the planner may choose: attributes of an experiment, and the values worth a look.

Each entry of CHOICES is one axis of the search. A new attribute needs one entry.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from paxlite.aot.planning.machine import Machine
from paxlite.config.attributes import attribute_types
from paxlite.experiments.language_model import LanguageModel


class BatchChoice(TypedDict):
  """The attributes of an experiment that decide its batch."""

  PERCORE_BATCH_SIZE: float
  NUM_MICROBATCHES: int


@dataclasses.dataclass(frozen=True)
class Choice:
  """One attribute to choose.

  Attributes:
    name: The attribute.
    values: Returns the values to try for an experiment on a machine.
    asked: Whether it is tried only where the user allows it with --try.
    own: Whether the experiment's own value is tried too.
  """

  name: str
  values: Callable[[LanguageModel, Machine], Sequence[object]]
  asked: bool = False
  own: bool = True

  def options(
    self, experiment: LanguageModel, machine: Machine, fixed: frozenset[str], tried: frozenset[str]
  ) -> list[object]:
    """Returns the values to try, the experiment's own first; only that one if it is to be kept."""
    if self.name not in attribute_types(type(experiment)):
      return []
    own = getattr(experiment, self.name)
    own = tuple(own) if isinstance(own, list) else own
    if self.name in fixed or (self.asked and self.name not in tried):
      return [own]
    return list(dict.fromkeys([*([own] if self.own else []), *self.values(experiment, machine)]))


def _any(*values: object) -> Callable[[LanguageModel, Machine], Sequence[object]]:
  return lambda e, machine: values


def _blocks(e: LanguageModel, machine: Machine) -> Sequence[int]:
  """Returns blocks of queries, for rows that are not too short and attention in plain XLA."""
  return [0, *(b for b in (512, 1024) if e.MAX_SEQ_LEN % b == 0 and 2 * b <= e.MAX_SEQ_LEN)]


def _repeated(e: LanguageModel, machine: Machine) -> Sequence[bool]:
  """Returns whether to repeat layers: an unrolled stack of many takes TPUs hours to compile."""
  return [True, False] if e.NUM_LAYERS <= _MOST_UNROLLED else [True]


def _repeats(e: LanguageModel, machine: Machine) -> Sequence[int]:
  """Returns numbers of groups of layers in a stage; only a pipeline has such groups."""
  return [r for r in (1, 2, 4) if num_units(e) % r == 0]


def _chunks(e: LanguageModel, machine: Machine) -> Sequence[int]:
  return [1, 4] if e.VOCAB_SIZE < 1 << 17 else [1, 4, 16]


def _moments(e: LanguageModel, machine: Machine) -> Sequence[bool]:
  """Returns whether moments are on the host, if the speed of its memory is known."""
  return [False, True] if machine.host else []


def _offloaded(e: LanguageModel, machine: Machine) -> Sequence[tuple[str, ...]]:
  """Returns the activations that are on the host: none, or the input of each layer."""
  return [(), ('iteration_input',)] if machine.host else []


_MOST_UNROLLED = 16
_POLICIES = (
  'SAVE_NOTHING', 'SAVE_ATTENTION', 'SAVE_OUT_PROJ', 'SAVE_QKV_OUT_PROJ_SEPARATE',
  'SAVE_DOT_WITH_NO_BATCH_DIM', 'SAVE_DOT_AND_ATTENTION', 'SAVE_EVERYTHING',
)  # fmt: skip

CHOICES: tuple[Choice, ...] = (
  Choice('CHECKPOINT_POLICY', _any(*_POLICIES)),
  Choice('NUM_LOSS_CHUNKS', _chunks),
  Choice('ATTENTION_BLOCK_SIZE', _blocks),
  Choice('USE_REPEATED_LAYER', _repeated, own=False),
  Choice('NUM_PIPELINE_REPEATS', _repeats),
  Choice('OFFLOAD_OPTIMIZER', _moments),
  Choice('OFFLOAD_ACTIVATIONS', _offloaded),
  Choice('USE_FP8', _any(False, True), asked=True),
  Choice('USE_INT8', _any('off', 'forward', 'forward_backward'), asked=True),
)
# what may be on the host, and the values that keep it on the devices
OFF_HOST: Mapping[str, object] = {'OFFLOAD_OPTIMIZER': False, 'OFFLOAD_ACTIVATIONS': ()}
ON_HOST = tuple(OFF_HOST)
MESH = ('MESH_AXES', 'ICI_MESH_SHAPE', 'DCN_MESH_SHAPE')
BATCH = ('PERCORE_BATCH_SIZE', 'NUM_MICROBATCHES')
NAMES = (*MESH, *BATCH, *(choice.name for choice in CHOICES))


def combinations(
  experiment: LanguageModel,
  machine: Machine,
  fixed: frozenset[str],
  tried: frozenset[str] = frozenset(),
) -> list[dict[str, object]]:
  """Returns every combination of the values of CHOICES."""
  found: list[dict[str, object]] = [{}]
  for choice in CHOICES:
    options = choice.options(experiment, machine, fixed, tried)
    if options:
      found = [{**values, choice.name: option} for values in found for option in options]
  own = {name: getattr(experiment, name) for name in found[0]}
  return [values for values in found if _sensible(values, attributes(values), own)]


def _sensible(
  values: Mapping[str, object], made: Mapping[str, object], own: Mapping[str, object]
) -> bool:
  """Returns whether a combination of values is worth a look; the experiment's own always are."""
  if values.get('USE_FP8') and values.get('USE_INT8', 'off') != 'off':
    return False  # they exclude each other
  if not values.get('OFFLOAD_ACTIVATIONS') or own['OFFLOAD_ACTIVATIONS']:
    return True
  # a policy that keeps more on the device is not for memory that is short
  return made['CHECKPOINT_POLICY'] in ('SAVE_NOTHING', 'SAVE_ATTENTION', own['CHECKPOINT_POLICY'])


def num_units(experiment: LanguageModel) -> int:
  """Returns how often an experiment's stack repeats its unit of blocks."""
  e = experiment
  return max((e.NUM_LAYERS - e.num_first_blocks) // e.blocks_per_layer, 1)


def pipeline_repeats(values: Mapping[str, object]) -> int:
  """Returns NUM_PIPELINE_REPEATS; 1 if the values have none."""
  found = values.get('NUM_PIPELINE_REPEATS', 1)
  assert isinstance(found, int)
  return found


def are_possible(
  values: Mapping[str, object], own_repeats: object, stages: int, layers: int, microbatches: int
) -> bool:
  """Returns whether values are possible on a mesh, and others do not do the same.

  Args:
    values: The values.
    own_repeats: The experiment's NUM_PIPELINE_REPEATS; 1 if it has none.
    stages: Stages of the mesh.
    layers: Repeated layers of a stage.
    microbatches: Parts of a batch.
  """
  repeats = pipeline_repeats(values)
  if stages == 1:
    return 'NUM_PIPELINE_REPEATS' not in values or repeats == own_repeats
  if not values.get('USE_REPEATED_LAYER', True) or layers % repeats:
    return False
  return repeats == own_repeats or repeats == 1 or microbatches > 1


def loss_chunks(values: Mapping[str, object]) -> int:
  """Returns NUM_LOSS_CHUNKS; 1 if the experiment has no such attribute."""
  found = values.get('NUM_LOSS_CHUNKS', 1)
  assert isinstance(found, int)
  return found


def attributes(values: Mapping[str, object]) -> dict[str, object]:
  """Returns the values as an experiment has them: lists instead of tuples."""
  return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def batches(
  experiment: LanguageModel,
  devices: int,
  shards: int,
  fixed: frozenset[str],
  global_batch: int | None,
  stages: int,
) -> list[BatchChoice]:
  """Returns the batches that a mesh can hold: rows a device, and microbatches.

  Args:
    experiment: The experiment.
    devices: Devices of the mesh.
    shards: Parts that the rows of a batch are split into.
    fixed: Attributes that stay as they are.
    global_batch: Rows of a batch of all devices; None tries several.
    stages: Stages of a pipeline, which works on microbatches.
  """
  e = experiment
  rows = [global_batch] if global_batch else [shards * 2**i for i in range(_DOUBLINGS)]
  if 'PERCORE_BATCH_SIZE' in fixed and not global_batch:
    rows = [round(e.PERCORE_BATCH_SIZE * devices)]
  found: list[BatchChoice] = []
  for total in rows:
    parts = [1, 2, 4, 8, 16, 32]
    if 'NUM_MICROBATCHES' in fixed:
      parts = [e.NUM_MICROBATCHES]
    elif len(rows) > 1 and stages == 1:
      parts = [1]  # microbatches save memory for a larger batch, which is always faster by token
    for part in parts:
      if total % (shards * part) == 0 and (stages == 1 or part >= stages or part == parts[-1]):
        found.append({'PERCORE_BATCH_SIZE': total / devices, 'NUM_MICROBATCHES': part})
  return found


_DOUBLINGS = 7  # each shard of a batch has 1, 2, 4 … 64 rows


def flags(values: Mapping[str, object], experiment: LanguageModel) -> dict[str, object]:
  """Returns the values that differ from those that the experiment states."""
  stated = {name: getattr(type(experiment), name, None) for name in values}
  return {n: v for n, v in values.items() if v != stated[n]}
