"""Runs --mode=verify: replays steps of a run, and compares what they give with what it has."""

import argparse
import dataclasses
import math

import jax

from paxlite.compilation.versions import versions
from paxlite.core.errors import TrainingError, UserError, listed
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount
from paxlite.losses.metrics import to_host
from paxlite.parallel import devices
from paxlite.processes.process_messages import say_once
from paxlite.programs.agreement import compare_configs
from paxlite.programs.run import Run
from paxlite.programs.run_folder import code_changes
from paxlite.proof.replay import Replay, copied
from paxlite.proof.starts import MESH, last_start, of_span, other_values
from paxlite.proof.state_differences import differences
from paxlite.tracking.summaries import short
from paxlite.tracking.writers import TrainRecords, read_records

_SHOWN = 5  # arrays and steps that differ
# Of a loss, relative: how sums in another order were seen to change it within hundreds of steps.
_TOLERANCES = {'float32': 1e-4, 'bfloat16': 2e-2, 'float16': 2e-2}


def verify(run: Run, first: int | None = None, last: int | None = None) -> None:
  """Replays the steps between two checkpoints, and compares metrics and the last state.

  Args:
    first: The step of the checkpoint to start from; 0 is the beginning of the run, and None the
      last checkpoint but one, or the beginning where there is one checkpoint.
    last: The step of the checkpoint to end with; None: the last one.

  Raises:
    UserError: There is nothing to compare, or a checkpoint is damaged.
    TrainingError: The replay gave something else.
  """
  compare_configs(run)
  replay = Replay(copied(run))
  first, last = _chosen(replay, first, last)
  replay.check(first)
  replay.check(last)
  replay.check_same_course(first, last)
  _verify(replay, first, last)


def verify_as_asked(run: Run, options: argparse.Namespace) -> None:
  """Does what --mode=verify asks for, with the options of a command line."""
  verify(run, options.from_step, options.to_step)


def _chosen(replay: Replay, first: int | None, last: int | None) -> tuple[int, int]:
  steps = replay.steps
  last = steps[-1] if last is None else last
  if last < 1:
    raise UserError(f'--to_step={last} must be at least 1')
  if first is None:
    first = max((step for step in steps if step < last), default=0)
  if not 0 <= first < last:
    raise UserError(f'--from_step={first} must be at least 0 and below --to_step={last}')
  return first, last


def _verify(replay: Replay, first: int, last: int) -> None:
  say_once(f'Devices: {devices.described()}')
  reasons = _other_bits(replay, first, last)
  state = replay.state(first)
  begin = 'the beginning' if not first else f'the checkpoint of step {first:,}'
  say_once(
    f'Replaying {amount(last - first, "step")} from {begin} to the checkpoint of step {last:,}.'
  )
  for reason in reasons:
    say_once(f'Other bits are expected: {reason}.')
  recorded = {
    record['step']: record
    for record in read_records(replay.run.folder / TrainRecords.name)
    if first < record['step'] <= last
  }
  task = replay.trainer.store.task.task
  found = _Found()
  with replay.stepping(first) as stepping:
    for step in range(first + 1, last + 1):
      state, metrics = stepping(state, stepping.draw(state))
      if step in recorded:
        found.compare(step, recorded[step], short(to_host(metrics), task.followed))
  kept = replay.state(last)
  arrays = jax.tree.leaves(kept)
  other = list(differences(state, kept))
  numbers = sum(x.size for x in arrays)
  _say_metrics(found)
  if not other:
    say_once(
      f'State of step {last:,}: {len(arrays)} arrays, {numbers:,} numbers, equal bit for bit.'
    )
  else:
    say_once(f'State of step {last:,}: {len(other)} of {len(arrays)} arrays differ:')
    for difference in sorted(other, key=lambda d: d.rank, reverse=True)[:_SHOWN]:
      say_once(f'  {difference}')
  dtype = replay.run.experiment.values().get('FPROP_DTYPE', 'float32')
  tolerance = _TOLERANCES.get(str(dtype), 2e-2)
  if reasons and other and not found.compared:
    raise UserError(
      'no recorded loss can be compared, and the states differ, which another order of sums also '
      'causes: no conclusion is possible'
    )
  if reasons and found.largest <= tolerance:
    say_once(
      f'Losses agree within {found.largest:.1e}. For sums in another order, {tolerance:.0e} is '
      f'allowed (FPROP_DTYPE={dtype}).'
    )
  elif reasons:
    raise TrainingError(
      f'the losses of the replay differ by {found.largest:.1e}; another order of sums allows '
      f'{tolerance:.0e}'
    )
  elif (other or found.steps) and (changed := code_changes(replay.run)):
    raise TrainingError(
      f'the replay differs from the run, and so does its code: {listed(changed)}. Undo the change '
      'to verify the devices'
    )
  elif other or found.steps:
    raise TrainingError(
      'the replay differs from the run. Versions, devices and mesh are the same, so a device or '
      'its memory failed, or kernels have no fixed order of sums (docs/verifying.md)'
    )


def _other_bits(replay: Replay, first: int, last: int) -> list[str]:
  """Returns what is not as it was when these steps were trained, and changes the order of sums."""
  run = replay.run
  found = []
  for start in of_span(run.folder, first, last) or [last_start(run.folder)]:
    changed = other_values(run.experiment, start.values)
    found += [text for name, text in changed.items() if name in MESH]
    found += _other_versions(start.versions)
  return list(dict.fromkeys(found))


def _other_versions(then: JsonObject) -> list[str]:
  now = versions()
  found = [
    f'the {name} were {then[name]} and are {now[name]}'
    for name in ('devices', 'processes')
    if name in then and then[name] != now[name]
  ]
  packages = then.get('packages', {})
  found += [
    f'{name} was {packages[name]} and is {version}'
    for name, version in now['packages'].items()
    if packages.get(name, version) != version
  ]
  return found


@dataclasses.dataclass
class _Found:
  """The recorded steps that were compared."""

  compared: int = 0  # how many there were
  steps: list[str] = dataclasses.field(default_factory=list)  # texts on those that differ
  largest: float = 0.0  # the largest relative difference of a loss

  def compare(
    self, step: int, recorded: dict[str, float | None], replayed: dict[str, float | None]
  ) -> None:
    self.compared += 1
    finite = lambda x: None if x is None or not math.isfinite(x) else x
    other = [
      f'{name} {replayed[name]!r}, recorded {recorded[name]!r}'
      for name in replayed
      if name in recorded and finite(replayed[name]) != recorded[name]
    ]
    if other:
      self.steps.append(f'step {step:,}: {"; ".join(other)}')
    one, two = finite(replayed['loss']), recorded.get('loss')
    if one is None or two is None:
      self.largest = self.largest if one == two else math.inf
    else:
      self.largest = max(self.largest, abs(one - two) / max(abs(two), 1e-30))


def _say_metrics(found: _Found) -> None:
  if not found.compared:
    say_once('No step between them is in metrics.jsonl (SUMMARY_INTERVAL_STEPS says which are).')
  elif not found.steps:
    steps = amount(found.compared, 'recorded step')
    say_once(f'Loss and gradients of {steps}: equal bit for bit.')
  else:
    say_once(f'{len(found.steps):,} of {found.compared:,} recorded steps differ, the first ones:')
    for text in found.steps[:_SHOWN]:
      say_once(f'  {text}')
