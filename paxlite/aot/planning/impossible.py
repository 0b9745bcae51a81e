"""The message of a plan if no candidate fits: the reason, and changes that would make one fit."""

import bisect
import dataclasses
import re
from collections.abc import Iterator, Mapping

import jax

from paxlite.aot import targets
from paxlite.aot.planning import choices, machine
from paxlite.aot.planning.candidates import Candidate, Space
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.machine import Machine
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.search import size
from paxlite.config.attributes import attribute_types
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.linked_stack import LinkedStack

NAMES = choices.NAMES
_SHORT = 128  # tokens of the shortest row that is proposed
_SURE = 0.95  # an estimate below this share of the memory counts as possible


def message(
  space: Space, estimator: Estimator, device: jax.Device, needed: float | None = None
) -> str:
  """Says why no candidate fits, and what would.

  Args:
    space: The candidates of the search.
    estimator: Its estimates.
    device: A device of the target, for which other models are traced.
    needed: The least bytes that the compiler says are needed; None if only estimates are known.
  """
  limit = space.machine.memory
  found = leanest(space, estimator)
  if found is None:
    return nothing_valid(space)
  candidate, estimate = found
  state = min(estimator.estimate(c).state for c in _lean(space))
  streams = candidate.values.get('OFFLOAD_OPTIMIZER')
  parts = 'parameters and counters' if streams else 'parameters, moments and counters'
  name = type(space.experiment).__name__
  where = f'{name} does not fit {_devices(space.machine)}'
  if state > limit:
    where += (
      f': its {parts} alone need {size(state)} of {size(limit)} on each device, in any layout'
    )
  else:
    memory = needed or estimate.memory
    about = '' if needed else 'about '
    where += f': the leanest way ({candidate}) needs {about}{size(memory)} of {size(limit)}'
  ways = list(_ways_out(space, estimator.model, device, state <= limit))
  if not ways:
    return where
  return f'{where}. What would fit: {"; or ".join(ways)}'


def leanest(space: Space, estimator: Estimator) -> tuple[Candidate, Estimate] | None:
  """Returns the candidate that is estimated to need least memory; None if there is none."""
  found = ((c, estimator.estimate(c)) for c in _lean(space))
  return min(found, key=lambda x: x[1].memory, default=None)


def _lean(space: Space) -> Iterator[Candidate]:
  """Yields the smallest batch on each mesh, with policy and loss chunks that need least memory."""
  combinations = choices.combinations(space.experiment, space.machine, space.fixed, space.tried)
  least = [c for c in combinations if c.get('CHECKPOINT_POLICY') == 'SAVE_NOTHING'] or combinations
  most = max(map(choices.loss_chunks, least), default=1)
  least = [c for c in least if choices.loss_chunks(c) == most]
  on_host = lambda c: sum(bool(c.get(name)) for name in choices.ON_HOST)
  most_on_host = max(map(on_host, least))
  kinds: dict[int, Mapping[str, object]] = {}
  for values in least:
    if on_host(values) == most_on_host:
      kinds.setdefault(choices.pipeline_repeats(values), values)
  seen = set()
  for candidate in dataclasses.replace(space, values=tuple(kinds.values())):
    repeats = choices.pipeline_repeats(candidate.values)
    rows = candidate.layout, candidate.microbatches, repeats
    if rows not in seen:  # the smallest batch of each mesh
      seen.add(rows)
      yield candidate


def nothing_valid(space: Space) -> str:
  """Returns the message where no mesh can split the batch."""
  machine = space.machine
  batch = space.global_batch
  text = f'{type(space.experiment).__name__} has no layout on {_devices(machine)}'
  if batch:
    near = range(max(batch - machine.devices, 1), batch + machine.devices + 1)
    for rows in sorted(near, key=lambda n: (abs(n - batch), n)):
      if any(True for _ in dataclasses.replace(space, global_batch=rows)):
        return f'{text} for a global batch of {batch} rows: the nearest is --global_batch={rows}'
  fixed = ', '.join(sorted(space.fixed))
  return f'{text} with {fixed} as they are: keep fewer' if fixed else text


def _ways_out(space: Space, model: Model, device: jax.Device, state_fits: bool) -> Iterator[str]:
  """Yields changes that would make a candidate fit, as parts of a sentence."""
  if more := _more_devices(space, model):
    yield f'--target={more}'
  e = space.experiment
  if 'USE_LORA' in attribute_types(type(e)) and not e.USE_LORA:
    factors = dataclasses.replace(space, experiment=e.replaced(USE_LORA=True))
    if _fits(factors, Model(factors.experiment, device)):
      yield 'LoRA, which trains low-rank factors alone (USE_LORA=True)'
  for name, ways in _leaner(space.machine):
    for values in ways:
      changed = dataclasses.replace(space, experiment=e.replaced(**values))
      if changed.experiment.values() == e.values():
        continue
      if _fits(changed, model.saving(changed.experiment)):
        yield f'{name} ({_flags(values)})'
        break
  if state_fits and (length := _shorter(space, device)):
    yield f'--seq_len={length}'


def _shorter(space: Space, device: jax.Device) -> int | None:
  """Returns the longest row that fits, of those that are halved once or more; None if none does."""
  e = space.experiment
  lengths = [n for i in range(1, 64) if (n := e.MAX_SEQ_LEN >> i) >= _SHORT]

  def fits(length: int) -> bool:
    shorter = dataclasses.replace(space, experiment=e.replaced(MAX_SEQ_LEN=length))
    return _fits(shorter, Model(shorter.experiment, device))

  first = bisect.bisect_left(lengths, True, key=fits)  # longer rows do not fit, shorter ones do
  return lengths[first] if first < len(lengths) else None


def _leaner(machine: Machine) -> Iterator[tuple[str, list[dict[str, object]]]]:
  """Yields what saves memory: its name, and attributes, the least change first."""
  narrow: dict[str, object] = {'ADAM_MOMENTS_DTYPE': 'bfloat16', 'GRADIENT_DTYPE': 'bfloat16'}
  if not machine.host:
    yield 'moments and gradients in bfloat16', [narrow]
    return
  moments: dict[str, object] = {'OFFLOAD_OPTIMIZER': True}
  inputs: dict[str, object] = {'OFFLOAD_ACTIVATIONS': ['iteration_input']}
  both = moments | inputs
  yield 'host offload', [moments, inputs, both, moments | narrow, both | narrow]
  yield 'moments and gradients in bfloat16', [narrow]


def _flags(values: Mapping[str, object]) -> str:
  return ' '.join(shell.flag(n, v) for n, v in values.items())


def _more_devices(space: Space, model: Model) -> str | None:
  """Returns the smallest larger machine of the same chips on which the experiment fits."""
  for name in larger(space.machine.name):
    big = machine.of_target(targets.parse(name))
    fixed = space.fixed - {'PERCORE_BATCH_SIZE'} - set(choices.MESH)
    batch = space.global_batch
    if batch and batch % big.devices:
      batch = None
    if _fits(dataclasses.replace(space, machine=big, fixed=fixed, global_batch=batch), model):
      return name
  return None


def larger(name: str) -> list[str]:
  """Returns the names of machines with more devices of the same chip, smallest first."""
  target = targets.parse(name)
  if target.chip is None or target.slices > 1:
    return []
  chip, count = target.chip, int(re.split('[-x]', name)[-1])
  if chip.platform == 'tpu':
    return [f'{chip.name}-{n}' for n in targets.slice_sizes(chip.name) if n > count]
  powers = [2**i for i in range(9)]
  sizes = [n for n in powers if n < chip.domain] + [n * chip.domain for n in powers]
  return [f'{chip.name}x{n}' for n in sizes if n > count]


def _fits(space: Space, model: Model) -> bool:
  found = leanest(space, Estimator(model, space.machine))
  if found is None or found[1].memory >= _SURE * space.machine.memory:
    return False
  try:
    found[0].of(space.experiment)
  except UserError:
    return False
  return True


def check(flag: str, names: list[str]) -> None:
  """Raises UserError if --keep or --try names what the planner does not choose."""
  for name in names:
    if name not in NAMES:
      raise UserError(f'--{flag}={name}: the planner chooses {", ".join(NAMES)}, and no other')


def _devices(machine: Machine) -> str:
  chip = re.sub(r'[x-].*', '', machine.name) if machine.name != 'here' else machine.platform
  return f'{machine.devices} × {chip}'


def without_host(space: Space) -> Space:
  """Returns the candidates that keep everything on the devices."""
  e = space.experiment.replaced(OFFLOAD_OPTIMIZER=False, OFFLOAD_ACTIVATIONS=[])
  return dataclasses.replace(space, experiment=e, fixed=space.fixed | {*choices.ON_HOST})


def check_counted(experiment: LanguageModel, machine: Machine) -> None:
  """Raises UserError if the experiment has values whose memory or time is not estimated."""
  values = experiment.values()
  if experiment.ROWS_PER_EXAMPLE > 1:
    raise UserError(
      f'ROWS_PER_EXAMPLE={experiment.ROWS_PER_EXAMPLE}: plans are for losses of single rows. '
      'paxlite compile takes this experiment'
    )
  if isinstance(experiment, LinkedStack) and experiment.has_links:
    raise UserError(
      f'{experiment.links}: plans are for stacks that repeat layers. paxlite compile takes this '
      'experiment'
    )
  moved = [name for name in choices.ON_HOST if values.get(name)]
  if moved and not machine.host and not machine.measured:
    raise UserError(
      f'{moved[0]}={values[moved[0]]}: the speed between a {machine.chip} and its host is not '
      'known. Write it as host_bandwidth (bytes/s each way) into a file and give it by '
      '--calibration=FILE'
    )
