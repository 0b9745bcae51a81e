"""The results of a recipe's stages: the table of evaluations, and the conditions."""

import math
import pathlib

from paxlite.core.json_text import JsonObject, number
from paxlite.recipes.recipe import Recipe, Stage
from paxlite.tracking.writers import EvalRecords, read_records

_HEADER = ['stage', 'evaluation', 'metric', 'before', 'after']
_ERROR = '_stderr'


def unmet(stage: Stage, folder: pathlib.Path) -> str:
  """Returns the failed condition at the end of a stage; '' if there is none."""
  condition = stage.condition
  if condition is None:
    return ''
  _, last = _evaluated(folder)
  value = number(last.get(condition.evaluation, {}).get(condition.metric))
  if value is None:
    there = ', '.join(f'{name}: {", ".join(_metrics(x))}' for name, x in last.items()) or 'nothing'
    return f'{stage.holds} cannot be checked: the run evaluated {there}'
  return '' if condition.is_met(value) else f'{stage.holds} does not hold: it is {value:.4g}'


def table(recipe: Recipe, folder: pathlib.Path) -> list[list[str]]:
  """Returns the rows of the table of all stages in a folder, the header first.

  Nats per byte are those of text whose bytes are known; answers of zero-shot tasks are those before
  the first step, and after the last one.
  """
  rows = [_HEADER]
  for name, stage in recipe.stages.items():
    if not isinstance(stage, Stage):
      continue
    first, last = _evaluated(folder / name)
    for evaluation, record in last.items():
      for metric, value in _metrics(record).items():
        before = _metrics(first.get(evaluation, {})).get(metric)
        cells = ['' if x is None else f'{x:.4f}' for x in (before, value)]
        rows.append([name, evaluation, metric, *cells])
  return rows


def lines(rows: list[list[str]]) -> list[str]:
  """Returns the lines of a table."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ['  '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _evaluated(folder: pathlib.Path) -> tuple[dict[str, JsonObject], dict[str, JsonObject]]:
  """Returns the records of step 0 and the last ones, by the names of the evaluations."""
  first: dict[str, JsonObject] = {}
  last: dict[str, JsonObject] = {}
  for record in read_records(folder / EvalRecords.name):
    (first if record['step'] == 0 else last)[str(record.get('input'))] = record
  return first, last


def _metrics(record: JsonObject) -> dict[str, float]:
  """Returns the metrics of an evaluation for the table."""
  values = {k: x for k, v in record.items() if (x := number(v)) is not None}
  if 'bits_per_byte' in values:
    return {'nats per byte': values['bits_per_byte'] * math.log(2)}
  tasks = {k: v for k, v in values.items() if f'{k}{_ERROR}' in values}
  return tasks or {k: v for k, v in values.items() if k == 'avg_xent'}
