"""Hours and cost of a recipe's stages on a machine, from the compiler or from measured steps."""

import math
import os
import platform
from typing import TYPE_CHECKING

from paxlite.core.errors import UserError, located

if TYPE_CHECKING:
  from paxlite.aot.targets import Target
  from paxlite.experiments.base import Experiment

NOTE = (
  'The hours are those of training steps: compiling, data, evaluations, checkpoints and the '
  'generation of answers come on top'
)


def price_of(text: str) -> float:
  """Parses the dollars per device hour; raises UserError."""
  try:
    price = float(text)
  except ValueError:
    price = math.nan
  if not 0 <= price < math.inf:
    raise UserError(f'--price={text} must be dollars of an hour of one device, such as --price=2.5')
  return price


def target_of(name: str) -> 'Target':
  """Returns the named machine and prepares compiling for it; call before importing JAX."""
  from paxlite.aot import targets

  if name != 'here':
    targets.prepare_environment()
  return targets.parse(name)


def hours_of(e: 'Experiment', target: 'Target', stage: str) -> float | None:
  """Returns the hours of all training steps of an experiment; None if their number is not known.

  The compiler for the target says how long a step takes, as for `paxlite plan`, and what it said is
  kept with the planner's verdicts. On `here`, steps are run. Raises UserError if the step does not
  fit the target, or its compiler is missing or refuses it.
  """
  if e.NUM_EPOCHS is not None:
    return None
  from paxlite.aot.planning import machine, verdicts, workers
  from paxlite.compilation import compiled_step

  where = machine.here() if target.chip is None else machine.of_target(target)
  about = dict(
    versions=compiled_step.versions(where.platform), code=verdicts.code_of(e),
    machine=where.name, node=platform.node(), flags=os.environ.get('XLA_FLAGS', ''),
    chip=str(target.chip),
  )  # fmt: skip
  store = verdicts.Store(about)
  with located(f'stage {stage}'):
    verdict = store.get(e.values())
    if verdict is None:
      is_here = target.chip is None
      verdict = workers.measured(e, where.memory) if is_here else workers.compiled(e, target)
      if not verdict.error:
        store.write(e.values(), verdict)
    if verdict.error:
      raise UserError(verdict.error)
    if not verdict.fits(where.memory):
      raise UserError(
        f'a step needs {verdict.memory / 1e9:.1f} GB of each device, and {target.name} has '
        f'{where.memory / 1e9:.1f} GB: paxlite plan finds what fits'
      )
  return verdict.seconds * e.MAX_STEPS / 3600


def cells(hours: float | None, target: 'Target', price: float | None) -> list[str]:
  """Returns the hours and dollars as text; without a price, the dollars are ''."""
  if hours is None:
    return ['?', '?']
  dollars = '' if price is None else f'{hours * target.devices * price:,.2f}'
  return [f'{hours:.3g}', dollars]
