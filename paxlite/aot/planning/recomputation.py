"""The checkpoint policy of a run with CHECKPOINT_POLICY=AUTO, by the devices that it has."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import fiddle as fdl
import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.aot.chips import chip_of_kind
from paxlite.aot.explanation_tables import size
from paxlite.aot.planning.estimate import Estimator
from paxlite.aot.planning.machine import Machine, near_devices
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.search import Question, Search
from paxlite.aot.planning.space import NAMES, Space, refusal
from paxlite.aot.planning.verdicts import Verdict
from paxlite.aot.planning.workers import attempted, compiled
from paxlite.aot.targets import Target
from paxlite.cli import live_line
from paxlite.cli.terminal import say
from paxlite.core.errors import line_of
from paxlite.data.base import OnPolicyInput
from paxlite.experiments.language_model import LanguageModel
from paxlite.parallel import devices
from paxlite.processes.process_messages import broadcast

log = logging.getLogger('paxlite')

_NAME, _LEAST = 'CHECKPOINT_POLICY', 'SAVE_NOTHING'
_MOST = 2  # programs to compile
_SHARE = 0.95  # of a device's memory that a step may need; evaluation and batches need the rest


def chosen(experiment: LanguageModel, beat: Callable[[], None]) -> tuple[str, str]:
  """Returns the policy of a new run, and a sentence that says why; ('AUTO', '') if it stays open.

  It is the fastest one by the estimates of `paxlite plan` whose compiled step fits the devices, or
  SAVE_NOTHING. It stays open for devices whose memory or speed is not known, for a mesh of other
  devices, and for experiments that the planner does not take or that generate their own data. All
  processes compile the same programs, and take the choice of process 0. An error of the planner
  leaves the choice open, and a mistake in the data is raised before any compilation.

  Args:
    experiment: The experiment of the run, on a mesh of all devices.
    beat: Called before and after each compilation.
  """
  if refusal(experiment) is not None or (where := machine()) is None or _generates(experiment):
    return 'AUTO', ''
  if experiment.num_devices != where.devices:
    return 'AUTO', ''
  fdl.build(experiment.train_input())
  try:
    found = _searched(experiment.replaced(NUM_EPOCHS=None), where, beat)  # MAX_STEPS is known
  except Exception as e:
    log.warning(
      'CHECKPOINT_POLICY=AUTO is SAVE_NOTHING, as the planner failed: %s: %s',
      type(e).__name__, line_of(e),
    )  # fmt: skip
    found = 'AUTO', ''
  policy, _, said = broadcast('\n'.join(found).encode()).decode().partition('\n')
  return policy, said


def _searched(
  experiment: LanguageModel, where: Machine, beat: Callable[[], None]
) -> tuple[str, str]:
  """Returns what `chosen` does, by this process."""
  space = Space(experiment, where, frozenset(NAMES) - {_NAME})
  estimator = Estimator(Model(experiment, jax.local_devices()[0]), where)
  pool = _Devices(experiment, _Present('here', where.chip, where.devices), beat)
  with live_line.working('Choosing a checkpoint policy', _say):
    plan = Search(space, estimator, pool, None, _MOST, lambda _: None, takes_first=True).run()
  if plan.interrupted:
    raise KeyboardInterrupt
  if not plan.best or (policy := plan.best[0].candidate.values[_NAME]) == _LEAST:
    return _LEAST, ''
  memory = f'{size(plan.best[0].verdict.memory)} of {size(where.memory / _SHARE)}'
  return policy, f'{_NAME}={policy}: it recomputes less than {_LEAST}, and a step needs {memory}'


def machine() -> Machine | None:
  """Returns the devices of all processes; None if their memory or their speed is not known."""
  found = devices.present()
  chip = chip_of_kind(found[0].device_kind)
  limits = [(d.memory_stats() or {}).get('bytes_limit', 0) for d in jax.local_devices()]
  megabytes = np.int32(min(limits) >> 20)
  if jax.process_count() > 1:
    megabytes = multihost_utils.process_allgather(megabytes).min()
  if chip is None or not megabytes:
    return None
  memory = _SHARE * float(megabytes << 20)
  return Machine('here', chip.platform, len(found), near_devices(found), memory, chip)


def _say(text: str) -> None:
  if jax.process_index() == 0:
    say(text)


def _generates(experiment: LanguageModel) -> bool:
  kind = fdl.get_callable(experiment.train_input())
  return isinstance(kind, type) and issubclass(kind, OnPolicyInput)


class _Present(Target):
  """The devices that are here, with the speeds of their chip."""

  def topology(self) -> list[jax.Device]:
    return devices.present()


class _Devices:
  """Compiles candidates in this process; see search.Pool."""

  size = 1

  def __init__(self, experiment: LanguageModel, target: Target, beat: Callable[[], None]):
    self._experiment, self._target, self._beat = experiment, target, beat

  def judge(self, asked: Sequence[Question]) -> Iterator[tuple[int, Verdict]]:
    """Yields (position, verdict); what all else falls back to needs no compiler."""
    for i, (_, values, _) in enumerate(asked):
      if values[_NAME] == _LEAST:
        yield i, Verdict(seconds=1.0)
        continue
      self._beat()
      experiment = self._experiment.replaced(**values)
      yield i, attempted(functools.partial(compiled, experiment, self._target))
      self._beat()
