"""Task metrics before and after fine-tuning, for reports."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Protocol

from paxlite.core.json_text import JsonObject, number

_ERROR = '_stderr'
_HEADER = ['task', 'metric', 'before', 'after', 'change', '']
_SMALLER_IS_BETTER = 'perplexity_per_word', 'bits_per_byte'


class _Run(Protocol):
  """The records of a run that the section needs."""

  @property
  def name(self) -> str: ...

  @property
  def evaluations(self) -> list[JsonObject]: ...


@dataclasses.dataclass(frozen=True)
class Change:
  """A metric of a task before training and after it.

  Attributes:
    task, metric: Their names.
    before, after: The values.
    error: The standard error of their difference, if both errors were independent. As both models
      answer the same examples, that is at least the true one in all but odd cases.
  """

  task: str
  metric: str
  before: float
  after: float
  error: float

  @property
  def gain(self) -> float:
    """The difference, positive if the model improved."""
    change = self.after - self.before
    return -change if self.metric in _SMALLER_IS_BETTER else change

  @property
  def verdict(self) -> str:
    if not self.gain:
      return 'the same'
    word = 'better' if self.gain > 0 else 'worse'
    if abs(self.gain) <= self.error:
      return f'{word}, within the standard error'
    return word if self.gain > 0 else word.upper()

  @property
  def cells(self) -> list[str]:
    change = f'{self.after - self.before:+.4f} ± {self.error:.4f}'
    return [self.task, self.metric, f'{self.before:.4f}', f'{self.after:.4f}', change, self.verdict]


def changes(records: Sequence[JsonObject], tasks: Collection[str] | None = None) -> list[Change]:
  """Returns the changes from the evaluation of step 0 to the last one, of each metric of a task.

  Args:
    records: Evaluations as in eval_metrics.jsonl.
    tasks: The names of the tasks; None: all inputs whose metrics have standard errors.
  """
  first: dict[str, JsonObject] = {}
  last: dict[str, JsonObject] = {}
  for record in records:
    name = record.get('input')
    if isinstance(name, str) and (tasks is None or name in tasks):
      (first if record.get('step') == 0 else last)[name] = record
  found = []
  for name in (n for n in first if n in last):
    for key, value in first[name].items():
      before, after = number(value), number(last[name].get(key))
      errors = [number(r[name].get(f'{key}{_ERROR}')) for r in (first, last)]
      if before is not None and after is not None and None not in errors:
        error = math.hypot(*(e or 0.0 for e in errors))
        found.append(Change(name, key, before, after, error))
  return found


def table_lines(found: Sequence[Change]) -> list[str]:
  """Returns a table for the terminal; [] without changes."""
  rows = [_HEADER, *(change.cells for change in found)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  line = lambda row: '  '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
  return ['Before and after the fine-tuning:', *map(line, rows)] if found else []


def sections(runs: Sequence[_Run]) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
  """Returns the section of a report: a row for each metric of each task of each run."""
  rows = [[run.name, *change.cells] for run in runs for change in changes(run.evaluations)]
  worse = sum(row[-1] == 'WORSE' for row in rows)
  notes = [f'Worse by more than the standard error: {worse} of {len(rows)}.'] if worse else []
  return [('Before and after fine-tuning', ['run', *_HEADER], rows, notes)] if rows else []
