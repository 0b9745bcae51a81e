"""Sections of `paxlite report` on rollouts by older parameters: how old, and who waits."""

from collections.abc import Sequence
from typing import Any

from paxlite.core.json_text import number

_COLUMNS = {
  'staleness': 'staleness',
  'importance': 'importance',
  'max_importance': 'largest importance',
  'wait_for_rollouts_seconds': 'training waited',
  'wait_for_training_seconds': 'generation waited',
}
_NOTE = (
  'Means over the recorded steps, and the largest of all largest ratios. Staleness counts updates. '
  'Seconds a step: training waited for answers and rewards, and generation for new weights.'
)


def sections(runs: Sequence[Any]) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
  """Returns the table of runs, each a report.records.RunRecords, with MAX_STALENESS or the like."""
  rows = [row for run in runs if {*(row := _row(run))[1:]} != {'–'}]
  header = ['run', *_COLUMNS.values()]
  return [('Rollouts by older weights', header, rows, [_NOTE] if rows else [])]


def _row(run: Any) -> list[str]:
  cells = [run.name]
  for name in _COLUMNS:
    values = [x for record in run.steps if (x := number(record.get(name))) is not None]
    value = (
      max(values, default=0.0) if name.startswith('max_') else sum(values) / max(len(values), 1)
    )
    unit = ' s' if name.endswith('seconds') else ''
    cells.append(f'{value:.3g}{unit}' if values else '–')
  return cells
