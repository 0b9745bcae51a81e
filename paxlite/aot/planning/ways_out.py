"""The message of a plan if no candidate fits: the reason, and changes that would make one fit."""

import bisect
import dataclasses
import re
from collections.abc import Iterator, Mapping

import jax

from paxlite.aot import targets
from paxlite.aot.explanation_tables import size
from paxlite.aot.planning import machine
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.machine import Machine
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.pages import assigned
from paxlite.aot.planning.space import MESH, NAMES, OFF_HOST, Candidate, Space, Values, attributes
from paxlite.config.attributes import attribute_types
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.linked_stack import LinkedStack

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
  where = f'{type(space.experiment).__name__} does not fit {space.machine}: '
  if state > limit:
    streams = candidate.values.get('OFFLOAD_OPTIMIZER')
    parts = 'parameters and counters' if streams else 'parameters, moments and counters'
    where += f'its {parts} alone need {size(state)} of {size(limit)} on each device, in any layout'
  else:
    memory = size(needed) if needed else f'about {size(estimate.memory)}'
    where += f'the leanest way ({candidate}) needs {memory} of {size(limit)}'
  ways = list(_ways_out(space, estimator.model, device, state <= limit))
  return f'{where}. What would fit: {"; or ".join(ways)}' if ways else where


def leanest(space: Space, estimator: Estimator) -> tuple[Candidate, Estimate] | None:
  """Returns the candidate that is estimated to need least memory; None if there is none."""
  found = ((c, estimator.estimate(c)) for c in _lean(space))
  return min(found, key=lambda x: x[1].memory, default=None)


def _lean(space: Space) -> Iterator[Candidate]:
  """Yields the smallest batch on each mesh, with values that need least memory."""
  least = list(space.combinations())
  least = [v for v in least if v.get('CHECKPOINT_POLICY') == 'SAVE_NOTHING'] or least
  saving = lambda v: (v.get('NUM_LOSS_CHUNKS', 1), sum(bool(v.get(name)) for name in OFF_HOST))
  chunks, on_host = (max(n) for n in zip(*map(saving, least), strict=True))
  kinds: dict[int, Values] = {}
  for values in least:
    if saving(values) == (chunks, on_host):
      kinds.setdefault(values.get('NUM_PIPELINE_REPEATS', 1), values)
  seen = set()
  for candidate in dataclasses.replace(space, values=tuple(kinds.values())):
    repeats = candidate.values.get('NUM_PIPELINE_REPEATS', 1)
    rows = candidate.layout, candidate.microbatches, repeats
    if rows not in seen:
      seen.add(rows)
      yield candidate


def nothing_valid(space: Space) -> str:
  """Returns the message where no mesh can split the batch."""
  batch, devices = space.global_batch, space.machine.devices
  text = f'{type(space.experiment).__name__} has no layout on {space.machine}'
  if batch:
    near = range(max(batch - devices, 1), batch + devices + 1)
    for rows in sorted(near, key=lambda n: (abs(n - batch), n)):
      if any(True for _ in dataclasses.replace(space, global_batch=rows)):
        return f'{text} for a global batch of {batch} rows: the nearest is --global_batch={rows}'
  fixed = ', '.join(sorted(space.fixed))
  return f'{text} with {fixed} as they are: keep fewer' if fixed else text


def _ways_out(space: Space, model: Model, device: jax.Device, state_fits: bool) -> Iterator[str]:
  """Yields changes that would make a candidate fit, as parts of a sentence."""
  e = space.experiment
  changed = lambda **values: dataclasses.replace(space, experiment=e.replaced(**values))
  traced = lambda space: _fits(space, Model(space.experiment, device))
  if more := _more_devices(space, model):
    yield f'--target={more}'
  if 'USE_LORA' in attribute_types(type(e)) and not e.USE_LORA and traced(changed(USE_LORA=True)):
    yield 'LoRA, which trains low-rank factors alone (USE_LORA=True)'
  for name, ways in _leaner(space.machine):
    for values in ways:
      leaner = changed(**attributes(values))
      saves = leaner.experiment.values() != e.values()
      if saves and _fits(leaner, model.saving(leaner.experiment)):
        flags = (assigned(n, value) for n, value in attributes(values).items())
        yield f'{name} ({" ".join(flags)})'
        break
  if state_fits:
    lengths = [n for i in range(1, 64) if (n := e.MAX_SEQ_LEN >> i) >= _SHORT]
    # longer rows do not fit, shorter ones do
    first = bisect.bisect_left(lengths, True, key=lambda n: traced(changed(MAX_SEQ_LEN=n)))
    if first < len(lengths):
      yield f'--seq_len={lengths[first]}'


def _leaner(machine: Machine) -> Iterator[tuple[str, list[Values]]]:
  """Yields what saves memory: its name, and attributes, the least change first."""
  narrow: Values = {'ADAM_MOMENTS_DTYPE': 'bfloat16', 'GRADIENT_DTYPE': 'bfloat16'}
  moments: Values = {'OFFLOAD_OPTIMIZER': True}
  inputs: Values = {'OFFLOAD_ACTIVATIONS': ('iteration_input',)}
  both = {**moments, **inputs}
  if machine.host:
    yield 'host offload', [moments, inputs, both, {**moments, **narrow}, {**both, **narrow}]
  yield 'moments and gradients in bfloat16', [narrow]


def _more_devices(space: Space, model: Model) -> str | None:
  """Returns the smallest larger machine of the same chips on which the experiment fits."""
  for name in larger(space.machine.name):
    big = machine.of_target(targets.parse(name))
    fixed = space.fixed - {'PERCORE_BATCH_SIZE', *MESH}
    batch = space.global_batch
    batch = None if batch and batch % big.devices else batch
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


def without_host(space: Space) -> Space:
  """Returns the candidates that keep everything on the devices."""
  e = space.experiment.replaced(**attributes(OFF_HOST))
  return dataclasses.replace(space, experiment=e, fixed=space.fixed | {*OFF_HOST})


def check_names(flags: Mapping[str, list[str]]) -> None:
  """Raises UserError if a flag, such as --keep, names what the planner does not choose."""
  for flag, names in flags.items():
    for name in names:
      if name not in NAMES:
        raise UserError(f'--{flag}={name}: the planner chooses {", ".join(NAMES)}, and no other')


def check_counted(experiment: LanguageModel, machine: Machine) -> None:
  """Raises UserError if the experiment has values whose memory or time is not estimated."""
  values = experiment.values()
  other = '. paxlite compile takes this experiment'
  if experiment.ROWS_PER_EXAMPLE > 1:
    rows = experiment.ROWS_PER_EXAMPLE
    raise UserError(f'ROWS_PER_EXAMPLE={rows}: plans are for losses of single rows{other}')
  if isinstance(experiment, LinkedStack) and experiment.has_links:
    raise UserError(f'{experiment.links}: plans are for stacks that repeat layers{other}')
  moved = [name for name in OFF_HOST if values.get(name)]
  if moved and not machine.host and not machine.measured:
    raise UserError(
      f'{moved[0]}={values[moved[0]]}: the speed between a {machine.chip.name} and its host is not '
      'known. Write it as host_bandwidth (bytes/s each way) into a file and give it by '
      '--calibration=FILE'
    )
