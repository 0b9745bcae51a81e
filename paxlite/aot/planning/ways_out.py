"""The message of a plan if no candidate fits: the reason, and changes that would make one fit."""

import dataclasses
from collections.abc import Iterator

from paxlite.aot import targets
from paxlite.aot.explanation_tables import size
from paxlite.aot.planning import machine
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.space import MESH, Candidate, Space, Values
from paxlite.config.attributes import attribute_types
from paxlite.core import shell
from paxlite.core.errors import UserError

_SHORT = 128  # tokens of the shortest row that is proposed
_SURE = 0.95  # an estimate below this share of the memory counts as possible
_NARROW: Values = {'ADAM_MOMENTS_DTYPE': 'bfloat16', 'GRADIENT_DTYPE': 'bfloat16'}
# what saves memory
_WAYS: dict[str, Values] = {
  'LoRA, which trains only low-rank factors': {'USE_LORA': True},
  'moments on the host': {'OFFLOAD_OPTIMIZER': True},
  'inputs of layers on the host': {'OFFLOAD_ACTIVATIONS': ['iteration_input']},
  'moments and gradients in bfloat16': _NARROW,
}
_OF_STATE = {'OFFLOAD_OPTIMIZER', *_NARROW}  # the layers are the same


def message(space: Space, estimator: Estimator, needed: float | None = None) -> str:
  """Explains why no candidate fits, and what would.

  Args:
    space: The candidates of the search.
    estimator: Its estimates.
    needed: The least bytes that the compiler says are needed; None if only estimates are known.
  """
  limit, found = space.machine.memory, leanest(space, estimator)
  if found is None:
    return nothing_valid(space)
  candidate, least = found
  where = f'{type(space.experiment).__name__} does not fit {space.machine}: '
  if least.state > limit:
    kept = 'parameters and counters'
    kept = kept if space.experiment.OFFLOAD_OPTIMIZER else 'parameters, moments and counters'
    state = f'{size(least.state)} of {size(limit)}'
    where += f'its {kept} alone need {state} on each device, in any layout'
  else:
    memory = size(needed) if needed else f'about {size(least.memory)}'
    where += f'the leanest way ({candidate}) needs {memory} of {size(limit)}'
  ways = list(_ways_out(space, estimator.model, least.state <= limit))
  return f'{where}. What would fit: {"; or ".join(ways) or "larger devices (--target)"}'


def leanest(space: Space, estimator: Estimator) -> tuple[Candidate, Estimate] | None:
  """Returns the candidate that is estimated to need least memory; None if there is no candidate.

  The state in its estimate is the least that any mesh needs.
  """
  saving = lambda v: (v['CHECKPOINT_POLICY'] == 'SAVE_NOTHING', v['NUM_LOSS_CHUNKS'])
  values = max(space.combinations(), key=saving)
  small = dict[object, Candidate]()  # the smallest batch on each mesh
  for candidate in dataclasses.replace(space, values=(values,)):
    small.setdefault((candidate.layout, candidate.microbatches), candidate)
  if not small:
    return None
  estimates = [(candidate, estimator.estimate(candidate)) for candidate in small.values()]
  found, estimate = min(estimates, key=lambda x: x[1].memory)
  return found, estimate._replace(state=min(e.state for _, e in estimates))


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


def _ways_out(space: Space, model: Model, state_fits: bool) -> Iterator[str]:
  """Yields changes that would make a candidate fit, as parts of a sentence."""
  e = space.experiment

  def fits(values: Values) -> bool:
    changed = e.replaced(**values)
    of = model.of(changed, has_same_layers=values.keys() <= _OF_STATE)
    return _fits(dataclasses.replace(space, experiment=changed), of)

  if more := _more_devices(space, model):
    yield f'--target={more}'
  for name, values in _WAYS.items():
    if (
      values.keys() <= attribute_types(type(e)).keys()
      and any(getattr(e, n) != value for n, value in values.items())
      and fits(values)
    ):
      yield f'{name} ({shell.flags(values)})'
  if state_fits:
    lengths = [n for i in range(1, 64) if (n := e.MAX_SEQ_LEN >> i) >= _SHORT]
    if length := next((n for n in lengths if fits({'MAX_SEQ_LEN': n})), None):
      yield f'MAX_SEQ_LEN={length}'


def _more_devices(space: Space, model: Model) -> str | None:
  """Returns the smallest larger machine of the same chips on which the experiment fits."""
  for name in targets.larger(space.machine.name):
    target = dataclasses.replace(targets.parse(name), chip=space.machine.chip)
    fixed = space.fixed - {'PERCORE_BATCH_SIZE', *MESH}
    batch = space.global_batch
    batch = None if batch and batch % target.devices else batch
    big = machine.of_target(target)
    if _fits(dataclasses.replace(space, machine=big, fixed=fixed, global_batch=batch), model):
      return name
  return None


def _fits(space: Space, model: Model) -> bool:
  found = leanest(space, Estimator(model, space.machine))
  if found is None or found[1].memory >= _SURE * space.machine.memory:
    return False
  try:
    found[0].of(space.experiment)
  except UserError:
    return False
  return True
