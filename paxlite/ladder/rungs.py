"""The small models of a ladder: their runs and their losses."""

import dataclasses
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from paxlite.core.errors import UserError
from paxlite.experiments import options
from paxlite.experiments.identity import run_values
from paxlite.experiments.language_model import LanguageModel
from paxlite.ladder import sizes, transfer
from paxlite.ladder.sizes import Parameters, Size
from paxlite.tracking.writers import EvalRecords, read_records

METRIC = 'avg_xent'  # of the first evaluation input
_NOTED = 'CHAT_DATE', 'CHAT_THINKING'  # which a run finds out when it starts


@dataclasses.dataclass(frozen=True)
class Rung:
  """A run of a ladder."""

  name: str  # the experiment as the command line names it
  given: dict[str, str]  # attributes that the user has set, as texts
  values: dict[str, object]  # the attributes that the rules set
  size: Size
  parameters: Parameters  # the numbers of its parameters
  rate: float  # the factor of its learning rate
  seed: int
  experiment: LanguageModel  # the experiment with all of these values
  folder: pathlib.Path  # where the run is

  @property
  def words(self) -> list[str]:
    """Its attributes as arguments of a command."""
    return words(self.given, self.values)

  @property
  def command(self) -> str:
    """The command that trains it, for a shell."""
    return shlex.join(['paxlite', 'train', self.name, f'--folder={self.folder}', *self.words])

  @property
  def flags(self) -> list[str]:
    """The arguments of paxlite.main that train it."""
    return [f'--fdl_config={self.name}', f'--job_log_dir={self.folder}', *self.words]

  @property
  def loss(self) -> float | None:
    """The held-out loss after its last step, in nats per token; None if not measured yet.

    A loss that is not finite is infinite. Raises UserError if the folder holds a run with other
    values.
    """
    found = run_values(self.folder)
    if found is None:
      return None
    kind = type(self.experiment)
    now = {'experiment': f'{kind.__module__}.{kind.__qualname__}', **self.experiment.values()}
    before = {'experiment': found['experiment'], **found['values']}
    changed = [
      name
      for name, value in now.items()
      if name in before and name not in _NOTED and before[name] != value
    ]
    if changed:
      changed.sort(key=lambda name: name not in self.given)  # others derive from these
      name, base = changed[0], ' (--base)' if 'RESIDUAL_FACTOR' in changed else ''
      raise UserError(
        f'{self.folder} holds a run of another ladder: {name} was {before[name]} and is '
        f'{now[name]}{base}. Choose another --folder, or delete that run'
      )
    for record in read_records(self.folder / EvalRecords.name):
      if record['step'] == self.experiment.MAX_STEPS:
        loss = record.get(METRIC)
        return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf
    return None


def needed(experiment: LanguageModel, values: Mapping[str, object]) -> dict[str, object]:
  """Returns the values that differ from an experiment's defaults, given the others."""
  found = dict(values)
  for name, value in values.items():
    rest = {other: x for other, x in found.items() if other != name}
    if options.value(experiment.replaced(**rest), name) == value:
      found = rest
  return found


def words(given: Mapping[str, str], values: Mapping[str, object]) -> list[str]:
  """Returns NAME=VALUE arguments of the user's values, after those that they override."""
  return [f'{name}={_text(value)}' for name, value in {**given, **values}.items()]


def _text(value: object) -> str:
  return f'[{",".join(map(str, value))}]' if isinstance(value, list) else str(value)


def check(experiment: LanguageModel) -> None:
  """Raises UserError if ladders do not support an experiment."""
  sizes.check(experiment)
  transfer.check(experiment)
  if not experiment.eval_inputs():
    raise UserError(
      f'{type(experiment).__name__} has no held-out data, which a ladder needs: derive it from a '
      'dataset with held-out data, such as paxlite.experiments.datasets.TextFiles, or set '
      'EVAL_FRACTION or EVAL_FILES'
    )
  if experiment.NUM_EPOCHS is not None:
    raise UserError(
      'NUM_EPOCHS needs the data, which a ladder does not read first: set MAX_STEPS instead'
    )


def rungs(
  name: str,
  given: dict[str, str],
  experiment: LanguageModel,
  of_sizes: Sequence[Size],
  base: Size,
  rates: Sequence[float],
  seeds: int,
  folder: pathlib.Path,
) -> list[Rung]:
  """Returns the runs of a ladder, the smallest first; each is validated.

  Raises UserError if a size is not possible, or its values are not valid.

  Args:
    name: The experiment as the command line names it.
    given: Attributes that the user has set, as texts.
    experiment: The experiment with these.
    of_sizes: The sizes of the models.
    base: The size at which the experiment's values hold.
    rates: Factors of its learning rate.
    seeds: How many seeds each model is trained with, from SEED on.
    folder: The folder in which the runs' folders are.
  """
  found = []
  for size in sorted(of_sizes):
    by_rules = transfer.values_of(experiment, size, base)
    parameters = transfer.counted(experiment.replaced(**by_rules))
    for rate in rates:
      for seed in range(experiment.SEED, experiment.SEED + seeds):
        values = by_rules | dict(
          LEARNING_RATE=experiment.LEARNING_RATE * rate, SEED=seed,
          EVAL_INTERVAL_STEPS=experiment.MAX_STEPS, SAMPLE_PROMPT=None,
        )  # fmt: skip
        made = experiment.replaced(**values)
        made.validate()
        ending = f'rate{rate:g}_' if rate != 1 else ''
        place = folder / f'{size}_{ending}seed{seed}'
        found.append(Rung(name, given, values, size, parameters, rate, seed, made, place))
  return found
