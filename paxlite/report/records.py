"""Reads the records in a run folder."""

import bisect
import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence

from paxlite.config.former_names import current_values
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject, number
from paxlite.core.wording import amount
from paxlite.files.json_files import read_object
from paxlite.files.schemes import records_of
from paxlite.tracking.writers import (
  EpisodeRecords,
  EvalRecords,
  SampleRecords,
  TrainRecords,
  read_records,
)
from paxlite.training import goodput

Points = list[tuple[float, float]]
_MOST_PLACES = 5  # of skipped steps that are named
_OF_RUNS = 'experiment.json', 'metrics.jsonl', 'eval_metrics.jsonl', 'goodput'


@dataclasses.dataclass(frozen=True)
class RunRecords:
  """The records of a run.

  Attributes:
    folder: The run's folder.
    name: The shortest end of the folder's path that is different from those of the other runs.
  """

  folder: pathlib.Path
  name: str

  @functools.cached_property
  def steps(self) -> list[JsonObject]:
    """The recorded training steps, with the tokens and hours of training up to each."""
    found, tokens, hours, before = [], 0.0, 0.0, 0
    for record in read_records(self.folder / TrainRecords.name):
      seconds, speed = number(record.get('step_seconds')), number(record.get('tokens_per_second'))
      if seconds and speed:
        tokens += (record['step'] - before) * seconds * speed
        hours += (record['step'] - before) * seconds / 3600
      before = record['step']
      found.append({**record, 'tokens': tokens, 'hours': hours})
    return found

  @functools.cached_property
  def evaluations(self) -> list[JsonObject]:
    """The evaluations: a step, an input, and numbers by metric."""
    return list(read_records(self.folder / EvalRecords.name))

  @functools.cached_property
  def samples(self) -> list[JsonObject]:
    """The model's samples: a step, a prompt and a text."""
    return list(read_records(self.folder / SampleRecords.name))

  @functools.cached_property
  def episodes(self) -> list[JsonObject]:
    """Episodes of rollouts, with their rewards."""
    return list(read_records(self.folder / EpisodeRecords.name))

  @functools.cached_property
  def values(self) -> JsonObject:
    """The experiment and its attributes; empty if they cannot be read."""
    found = self.read('experiment.json')
    values = found.get('values')
    rest = current_values(values, say=False) if isinstance(values, dict) else {}
    return {'experiment': found.get('experiment'), **rest} if found else {}

  @functools.cached_property
  def losses(self) -> dict[str, list[str]]:
    """For each loss by its name, its metrics of which larger values are better; {}: not known."""
    found = self.read('experiment.json').get('losses')
    known = found.items() if isinstance(found, dict) else ()
    return {name: names for name, names in known if isinstance(names, list)}

  @functools.cached_property
  def versions(self) -> dict[str, str]:
    """Devices and versions of packages, as texts."""
    found = self.read('versions.json')
    packages = found.get('packages')
    texts = {'devices': found.get('devices'), 'processes': found.get('processes')}
    texts |= {'python': found.get('python')}
    texts |= packages if isinstance(packages, dict) else {}
    return {k: str(v) for k, v in texts.items() if v is not None}

  @functools.cached_property
  def goodput(self) -> goodput.GoodputReport | None:
    return goodput.report(self.folder)

  @property
  def warnings(self) -> list[str]:
    """Sentences about what is missing or left out."""
    found = []
    for name, records in ((TrainRecords.name, self.steps), (EvalRecords.name, self.evaluations)):
      path = self.folder / name
      if not path.is_file():
        found.append(f'{name} is missing.')
        continue
      lines = len([x for x in path.read_bytes().split(b'\n') if x])
      damaged = lines - len(records)
      if damaged:
        found.append(f'{damaged} of {lines} lines of {name} cannot be read and are left out.')
    for name, held in (('experiment.json', self.values), ('versions.json', self.versions)):
      if not held:
        found.append(f'{name} is missing or cannot be read.')
    missing = sum(1 for r in self.steps if number(r.get('loss')) is None)
    if missing:
      found.append(f'{missing} recorded steps have no finite loss and are left out of the curves.')
    return found + self._skipped

  @property
  def _skipped(self) -> list[str]:
    """A sentence about the steps that changed nothing: how many, when, and why."""
    counts = [(r['step'], int(number(r.get('skipped_steps')) or 0)) for r in self.steps]
    total = counts[-1][1] if counts else 0
    if not total:
      return []
    changes = zip([(0, 0), *counts], counts, strict=False)
    where = [f'{n - m:,} in steps {a + 1:,} to {b:,}' for (a, m), (b, n) in changes if n > m]
    shown = ', '.join(where[:_MOST_PLACES]) + (' …' if len(where) > _MOST_PLACES else '')
    return [
      f'{amount(total, "step")} skipped because of a non-finite gradient or loss: {shown}. Skipped '
      'steps change nothing.'
    ]

  def series(self, metric: str, over: str) -> Points:
    """Returns the finite values of a metric over 'step', 'tokens' or 'hours'."""
    pairs = ((number(r.get(over)), number(r.get(metric))) for r in self.steps)
    return [(x, y) for x, y in pairs if x is not None and y is not None]

  def evaluated(self, name: str, metric: str, over: str) -> Points:
    """Returns the values of a metric of evaluation input `name`, over what `series` says."""
    at = {} if over == 'step' else {r['step']: r.get(over) for r in self.steps}
    known = sorted(at)
    points = []
    for record in self.evaluations_of.get(name, ()):
      y = number(record.get(metric))
      if y is None:
        continue
      # an evaluation may be between two records of training
      before = bisect.bisect_right(known, record['step'])
      x = number(record['step'] if over == 'step' else at[known[before - 1]] if before else None)
      if x is not None:
        points.append((x, y))
    return points

  @functools.cached_property
  def evaluations_of(self) -> dict[str, list[JsonObject]]:
    """The evaluations by their input."""
    found: dict[str, list[JsonObject]] = {}
    for record in self.evaluations:
      if isinstance(record.get('input'), str):
        found.setdefault(record['input'], []).append(record)
    return found

  @property
  def evaluated_metrics(self) -> list[tuple[str, str]]:
    """The inputs and metrics of the evaluations, in the order of their first record."""
    found = {
      (r['input'], k): None
      for r in self.evaluations
      if isinstance(r.get('input'), str)
      for k, v in r.items()
      if k != 'step' and number(v) is not None
    }
    return list(found)

  def read(self, name: str) -> JsonObject:
    """Returns the contents of a JSON file of the folder; {} if it cannot be read."""
    path = self.folder / name
    try:
      return read_object(path) if path.is_file() else {}
    except UserError:
      return {}


def read_runs(folders: Sequence[str]) -> list[RunRecords]:
  """Returns the records of runs.

  Raises:
    UserError: A folder is not that of a run, or is listed twice.
  """
  paths = [records_of(f) for f in folders]
  for path in paths:
    if not path.is_dir() or not any((path / name).exists() for name in _OF_RUNS):
      raise UserError(f'{path} is not the folder of a run')
    if paths.count(path) > 1:
      raise UserError(f'{path} is listed twice')
  depth = 1
  while len({p.parts[-depth:] for p in paths}) < len(paths):
    depth += 1
  return [RunRecords(p, '/'.join(p.parts[-depth:])) for p in paths]


def thinned(points: Points, most: int) -> Points:
  """Returns at most `most` points, with the smallest and largest value of each interval."""
  if len(points) <= most:
    return points
  size = math.ceil(2 * len(points) / most)
  kept: Points = []
  for start in range(0, len(points), size):
    part = points[start : start + size]
    ends = {part.index(min(part, key=lambda p: p[1])), part.index(max(part, key=lambda p: p[1]))}
    kept += [part[i] for i in sorted(ends)]
  return kept


def differing(runs: Sequence[RunRecords]) -> list[tuple[str, list[Json]]]:
  """Returns the attributes with different values in the runs, with the values."""
  names = sorted({name for run in runs for name in run.values})
  rows = [(name, [run.values.get(name) for run in runs]) for name in names]
  return [(name, values) for name, values in rows if any(v != values[0] for v in values)]
