"""Sections of `paxlite report` on a run's step: predicted, measured by block, explained."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from paxlite.aot.explanation_tables import (
  BLOCK_HEADER,
  UNKNOWN,
  Table,
  block_rows,
  milliseconds,
  size,
  tables,
)
from paxlite.core.json_text import number

EXPLANATION = 'explanation.json'  # in a run's folder, where `paxlite explain --json` may write it
_ABOUT_BLOCKS = (
  'FLOPs and memory traffic are shares of the compiled program, as in `paxlite explain`; the '
  'backward pass recomputes some FLOPs. Predicted seconds follow from the kernels and the speeds '
  'of the chip. Kernels may overlap, so their sum is not the step time. Measured collectives '
  f'include waiting for other devices. {UNKNOWN.capitalize()} are kernels of several CUDA graphs.'
)


def sections(runs: Sequence[Any]) -> list[Table]:
  """Returns the tables about runs, each a report.records.RunRecords."""
  explained = [table for run in runs for table in _read(_explanation, run)]
  return [_prediction(runs), _blocks(runs), *explained]


def _read(rows: Callable[[Any], Iterable[Any]], run: Any) -> list[Any]:
  """Returns what a function reads from the files of a run; [] if these are damaged."""
  try:
    return list(rows(run))
  except (LookupError, TypeError, ValueError, AttributeError):
    return []


def _prediction(runs: Sequence[Any]) -> Table:
  """Returns rows for each run whose step was predicted: its parts, the whole, and the memory."""
  found = {run.name: _read(_parts, run) for run in runs}
  notes = ['A step is measured as a whole: the median of several.'] if any(found.values()) else []
  if others := [name for name, rows in found.items() if not rows]:
    notes.append(
      'No prediction for these runs, which ended within 50 steps of a start or ran on devices '
      f'with unknown speeds, such as CPUs: {", ".join(others)}.'
    )
  rows = [(name, *row) for name, rows in found.items() for row in rows]
  header = ('run', 'part of a step', 'predicted', 'measured', 'measured / predicted')
  return Table('A step, predicted and measured', header, rows, notes)


def _parts(run: Any) -> Iterator[Sequence[str]]:
  found = run.read('predicted.json')
  for name, value in found['predicted_parts'].items():
    if seconds := number(value):
      yield name, milliseconds(seconds), '–', '–'
  steps = f'the whole step, the median of {found["measured_steps"]} ({found["chip"]})'
  yield steps, *_compared(milliseconds, found, 'seconds')
  if found['memory']:
    yield 'memory of a device', *_compared(size, found['memory'], 'bytes')


def _compared(
  text: Callable[[float | None], str], found: Mapping[str, Any], unit: str
) -> tuple[str, str, str]:
  predicted, measured = (number(found.get(f'{x}_{unit}')) for x in ('predicted', 'measured'))
  ratio = f'{measured / predicted:.2f}' if measured is not None and predicted else '–'
  return text(predicted), text(measured), ratio


def _blocks(runs: Sequence[Any]) -> Table:
  """Returns rows for each run with a trace: its blocks, most first, and their sum."""
  of = lambda run: block_rows(run.read('step_blocks.json')['blocks'], ['predicted', 'measured'])
  rows = [(run.name, *row) for run in runs for row in _read(of, run)]
  header = ('run', *(name.removeprefix('#') for name in BLOCK_HEADER), 'predicted', 'measured')
  return Table('The blocks of a step', header, rows, [_ABOUT_BLOCKS] if rows else [])


def _explanation(run: Any) -> Iterator[Table]:
  if found := run.read(EXPLANATION):
    for table in tables(found):
      header = [name.removeprefix('#') for name in table.header]
      yield table._replace(title=f'{run.name}: {table.title}', header=header)
