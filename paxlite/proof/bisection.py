"""Finds the first step and array where two runs part that should agree."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlite.core.errors import UserError, line_of, listed
from paxlite.core.json_text import Json
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.experiments.code_changes import other_code
from paxlite.experiments.identity import run_values
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_object
from paxlite.losses.metrics import Metrics, to_host
from paxlite.processes.process_messages import say_once
from paxlite.programs.run import Run
from paxlite.proof.layer_outputs import first_difference, layer_outputs
from paxlite.proof.replay import Replay
from paxlite.proof.starts import MESH, last_start
from paxlite.proof.state_differences import ArrayDifference, differences
from paxlite.tracking.writers import TrainRecords, read_records
from paxlite.training.sharded_task import ShardedTask
from paxlite.training.train_state import TrainState

_SHOWN = 8  # values and arrays
_NOT_COMPARED = ('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu')


def bisect(one: Run, other: Run) -> None:
  """Prints where two runs part: before training, in their records, checkpoints and replays.

  Raises UserError if a folder holds no run, or one cannot be replayed.
  """
  runs = one, other
  say_once(f'A is {one.place}, and B is {other.place}.')
  of_mesh = tuple(f'{name}:' for name in MESH)
  values, places = _other_values(runs), _other_versions(runs)
  other_places = [line for line in values if line.startswith(of_mesh)] + places
  code = [] if values else other_code(one.folder, other.folder)  # values change the config, too
  before = [*values, *code, *places, *_other_data(runs)]
  same = 'nothing differs: values, versions and devices of the last starts, and data'
  _say_list('Before training', before or [same])
  parted = _first_other_record(runs)
  replays = Replay(one), Replay(other)
  start, end = _checkpoints(replays, parted)
  if start is None:
    return
  for name, replay in zip('AB', replays, strict=True):
    try:
      replay.check_same_course(start, end)
    except UserError as e:
      say_once(f'{name} cannot be replayed from step {start:,} to {end:,}: {e}')
      return
  say_once(f'Replaying both from {"the beginning" if not start else f"step {start:,}"}:')
  found = _replayed(replays, start, end)
  if found is None:
    say_once(f'  both give the same bits up to step {end:,}, on this machine with these versions')
    if parted is not None and other_places:
      say_once(f'  So the difference comes from where they ran: {other_places[0]}')
    elif parted is not None:
      say_once(
        '  So the difference comes from where they ran: paxlite verify shows which one is right'
      )
    return
  for line in found:
    say_once(f'  {line}')


def _other_values(runs: tuple[Run, Run]) -> list[str]:
  """Returns lines on attributes with other values."""
  identities = [run_values(run.folder) or {'experiment': '?', 'values': {}} for run in runs]
  one, two = ({'experiment': x['experiment'], **x['values']} for x in identities)
  names = sorted(name for name in {**one, **two} if one.get(name) != two.get(name))
  return [f'{name}: {one.get(name)!r} in A, {two.get(name)!r} in B' for name in names]


def _other_versions(runs: tuple[Run, Run]) -> list[str]:
  """Returns lines on versions and devices, as of the last start of each run."""
  flat = []
  for run in runs:
    found = last_start(run.folder).versions
    flat.append({**found.get('packages', {}), **found, 'packages': None})
  one, two = flat
  return [
    f'{name}: {one.get(name)} in A, {two.get(name)} in B'
    for name in {**one, **two}
    if one.get(name) != two.get(name)
  ]


def _other_data(runs: tuple[Run, Run]) -> list[str]:
  """Returns lines on the data, by what the first checkpoints say of them."""
  kept = []
  for run in runs:
    checkpoints = run.checkpoints()
    steps = checkpoints.steps()
    path = checkpoints.folder(steps[0]) / 'data' / 'metadata' if steps else None
    kept.append(read_object(path) if path is not None and path.is_file() else {})
  what = {
    'fingerprint': 'the records of the training data differ',
    'tokens': 'the records are encoded differently (tokenizer, template, TOO_LONG …)',
    'batch_size': 'the batches have another number of rows',
  }
  one, two = kept
  return [
    text
    for name, text in what.items()
    if name in one.keys() & two.keys() and one[name] != two[name]
  ]


def _first_other_record(runs: tuple[Run, Run]) -> int | None:
  """Prints the first step with different records; returns it, or None."""
  one, two = ({r['step']: r for r in read_records(run.folder / TrainRecords.name)} for run in runs)
  common = sorted(one.keys() & two.keys())
  if not common:
    say_once('Records: the runs have no recorded step in common.')
    return None
  for step in common:
    other = _other_numbers(one[step], two[step])
    if other:
      before = [s for s in common if s < step]
      equal = f'equal up to step {before[-1]:,}, ' if before else ''
      say_once(f'Records: {equal}they differ from step {step:,}: {"; ".join(other)}.')
      return step
  say_once(f'Records: all {len(common):,} common steps are equal.')
  return None


def _other_numbers(one: Mapping[str, Json], two: Mapping[str, Json]) -> list[str]:
  return [
    f'{name} {one[name]!r} in A, {two[name]!r} in B'
    for name in one
    if name in two and name not in _NOT_COMPARED and one[name] != two[name]
  ]


def _checkpoints(replays: tuple[Replay, Replay], parted: int | None) -> tuple[int | None, int]:
  """Prints which checkpoints are equal; returns the steps to replay from and to.

  The first is None where there is nothing to replay.
  """
  common = sorted(set(replays[0].steps) & set(replays[1].steps))
  problem = _other_variables(replays)
  if problem:
    say_once(f'Checkpoints: {problem}.')
    return None, 0
  for replay in replays:
    for step in common:
      replay.check(step)
  equal, other = 0, None
  low, high = -1, len(common)  # the states of common[low] are equal, and those of common[high] not
  while high - low > 1:
    middle = (low + high) // 2
    if _state_differences(replays, common[middle]):
      high = middle
    else:
      low = middle
  if low >= 0:
    equal = common[low]
    say_once(f'Checkpoints: the states of step {equal:,} are equal bit for bit.')
  if high < len(common):
    other = common[high]
    found = _state_differences(replays, other)
    say_once(f'Checkpoints: the states of step {other:,} differ in {_arrays(len(found))}.')
  if low < 0:
    found = _state_differences(replays, 0)
    if found:
      say_once('The runs differ before the first step: their initial states differ:')
      _say_differences(found)
      return None, 0
  ends = [step for step in (other, parted) if step is not None and step > equal]
  if not common and parted is None:
    say_once('Checkpoints: the runs have none of the same step, so no states can be compared.')
    return None, 0
  if not ends:
    if parted is not None:
      say_once('The records differ but the states do not: other runs also wrote them.')
    else:
      say_once('Nothing differs up to the last step that both have.')
    return None, 0
  return equal, min(ends)


def _other_variables(replays: tuple[Replay, Replay]) -> str:
  """Returns what keeps two states from being compared; '' if nothing does."""
  one, two = (
    {
      path_name(path): (x.shape, str(x.dtype))
      for path, x in jax.tree_util.tree_leaves_with_path(replay.trainer.store.task.abstract)
    }
    for replay in replays
  )
  if one.keys() != two.keys():
    names = sorted(one.keys() ^ two.keys())
    return f'the states have other arrays: {listed(names)}'
  other = [name for name in one if one[name] != two[name]]
  return f'arrays have other shapes: {listed(sorted(other))}' if other else ''


def _state_differences(replays: tuple[Replay, Replay], step: int) -> list[ArrayDifference]:
  one, two = (replay.state(step) for replay in replays)
  return list(differences(one, two))


def _replayed(replays: tuple[Replay, Replay], start: int, end: int) -> list[str] | None:
  """Returns lines on the first step where two replays part; None if they do not."""
  one, two = (replay.state(start) for replay in replays)
  with replays[0].stepping(start) as of_one, replays[1].stepping(start) as of_two:
    for step in range(start + 1, end + 1):
      batches = of_one.draw(one), of_two.draw(two)
      if found := _other_batches(*batches):
        return [f'step {step:,}: the batches differ: {found}']
      kept = jax.tree.map(lambda x: x.copy(), one)
      (one, of_a), (two, of_b) = of_one(one, batches[0]), of_two(two, batches[1])
      other = list(differences(one, two))
      metrics = _other_metrics(of_a, of_b)
      if other or metrics:
        return _explained(replays, kept, batches, step, metrics, other)
  return None


def _other_batches(one: Mapping[str, jax.Array], two: Mapping[str, jax.Array]) -> str:
  """Returns the first place where two batches differ; '' if there is none."""
  if one.keys() != two.keys():
    return f'one has {", ".join(sorted(one.keys() ^ two.keys()))}, and the other does not'
  for name in one:
    a, b = _whole(one[name]), _whole(two[name])
    if a.shape != b.shape or a.dtype != b.dtype:
      return f'{name} is {a.dtype}{list(a.shape)} in A and {b.dtype}{list(b.shape)} in B'
    if a.tobytes() != b.tobytes():
      places = np.argwhere(a.view(f'u{a.itemsize}') != b.view(f'u{b.itemsize}'))
      place = [int(i) for i in places[0]]
      rows = len(np.unique(places[:, 0]))
      return (
        f'{name} in {rows} of {len(a)} rows, first in row {place[0]} at position {place[1:]}: '
        f'{a[tuple(place)]} in A, {b[tuple(place)]} in B. paxlite data RUN --step shows the texts'
      )
  return ''


def _whole(array: jax.Array) -> np.ndarray:
  """Returns an array that may be spread over several processes, which all call this."""
  if array.is_fully_addressable:
    return np.asarray(array)
  return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _other_metrics(one: Metrics, two: Metrics) -> list[str]:
  a, b = to_host(one), to_host(two)
  same = lambda x, y: x == y or (x != x and y != y)
  return [
    f'{name.rpartition("/")[2]} {a[name]!r} in A, {b.get(name)!r} in B'
    for name in a
    if not same(a[name], b.get(name, a[name]))
  ]


def _explained(
  replays: tuple[Replay, Replay],
  state: TrainState,
  batches: Sequence[Mapping[str, jax.Array]],
  step: int,
  metrics: list[str],
  arrays: list[ArrayDifference],
) -> list[str]:
  """Returns lines on a step that parts two runs, although state and batch before it are equal."""
  one, two = (_gradients(r, state, b, step) for r, b in zip(replays, batches, strict=True))
  of_gradients = list(differences(one, two))
  total = len(jax.tree.leaves(one))
  lines = [f'step {step:,}: the state before it and its batch are equal']
  if metrics:
    lines.append(f'metrics: {"; ".join(metrics[:4])}')
  if of_gradients:
    lines.append(f'gradients: {len(of_gradients)} of {_arrays(total)} differ')
    lines += [f'  {d}' for d in of_gradients[:_SHOWN]]
    lines += _layers(replays, state, batches, step)
  else:
    lines.append(f'gradients: all {total} arrays are equal, so the optimizer causes the difference')
  lines.append(f'state after it: {_arrays(len(arrays))} differ')
  lines += [f'  {d}' for d in ([] if of_gradients else arrays[:_SHOWN])]
  return lines


def _layers(
  replays: tuple[Replay, Replay],
  state: TrainState,
  batches: Sequence[Mapping[str, jax.Array]],
  step: int,
) -> list[str]:
  """Returns a line on the first layer with a different output; [] if unknown."""
  experiments = [replay.run.experiment for replay in replays]
  is_pipeline = any(isinstance(e, LanguageModel) and e.num_stages > 1 for e in experiments)
  if jax.process_count() > 1 or is_pipeline:
    return []
  tasks = [replay.trainer.store.task for replay in replays]
  try:
    one, two = (
      layer_outputs(task, state, batch, _key(task, step))
      for task, batch in zip(tasks, batches, strict=True)
    )
  except jax.errors.JaxRuntimeError as e:  # the batch is not cut into microbatches
    return [f'layers: not compared: {line_of(e)}']
  if name := first_difference(one, two):
    return [f'layers: the first with another output is {name}']
  cuts = [str(e.values().get('NUM_MICROBATCHES')) for e in experiments]
  if cuts[0] != cuts[1]:
    return [
      f'layers: the outputs of all {len(one)} are equal for the whole batch. NUM_MICROBATCHES is '
      f'{cuts[0]} in A and {cuts[1]} in B, so sums over microbatches may cause the difference'
    ]
  return [
    f'layers: the outputs of all {len(one)} are equal, so the loss or the backward pass causes '
    'the difference'
  ]


def _key(sharded: ShardedTask, step: int) -> jax.Array:
  """Returns the random key of a step."""
  return jax.random.fold_in(jax.random.key(sharded.seed), step - 1)


def _gradients(
  replay: Replay, state: TrainState, batch: Mapping[str, jax.Array], step: int
) -> PyTree:
  sharded = replay.trainer.store.task
  task = sharded.task
  key = _key(sharded, step)

  def gradients(params: PyTree, batch: Mapping[str, jax.Array], fp8_state: PyTree) -> PyTree:
    return task.grads(params, dict(batch), key, fp8_state)[0]

  with sharded.compiling():
    return jax.jit(gradients)(state.params, dict(batch), state.fp8_state)


def _arrays(count: int) -> str:
  return '1 array' if count == 1 else f'{count} arrays'


def _say_list(title: str, lines: Sequence[str]) -> None:
  say_once(f'{title}:')
  for line in lines[:_SHOWN]:
    say_once(f'  {line}')
  if len(lines) > _SHOWN:
    say_once(f'  and {len(lines) - _SHOWN} more')


def _say_differences(found: Sequence[ArrayDifference]) -> None:
  for difference in found[:_SHOWN]:
    say_once(f'  {difference}')
  if len(found) > _SHOWN:
    say_once(f'  and {len(found) - _SHOWN} arrays more')
