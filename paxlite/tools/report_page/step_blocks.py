"""What the blocks of a model have of a traced step, foreseen and measured: a table of a report."""

from collections.abc import Iterator, Mapping, Sequence

from paxlite.aot.explanation_text import block_order
from paxlite.aot.step_blocks import UNKNOWN
from paxlite.core.json_text import JsonObject
from paxlite.tools.report_page.forecasts import milliseconds
from paxlite.tools.report_page.records import RunRecords, number

HEADER = [
  'run', 'block', 'FLOPs', 'memory traffic', 'foreseen', 'measured', 'share of what is measured',
]  # fmt: skip
ALL = 'all blocks, one after the other'


def table(runs: Sequence[RunRecords]) -> tuple[list[str], list[list[str]]]:
  """Returns rows for each run with a trace: its blocks in the order of the model, and their sum."""
  return HEADER, [[run.name, *row] for run in runs for row in _rows(_blocks(run))]


def notes(runs: Sequence[RunRecords]) -> list[str]:
  """Returns sentences about what the table means; [] if it is empty."""
  found = [
    f'{run.name}: the mean of {run.step_blocks.get("steps")} traced steps; '
    f'{_lost(_blocks(run)):.1%} of the time is of instructions that the program does not name.'
    for run in runs
    if _blocks(run)
  ]
  if not found:
    return []
  return [
    *found,
    'FLOPs and memory traffic are shares of the compiled program, as `paxlite explain` divides it. '
    'Foreseen seconds are those of the kernels by the speeds of the chip. Kernels may run at the '
    'same time, so that their sum is not the time of a step. Collectives are measured with the '
    'waiting for other devices.',
  ]


def _blocks(run: RunRecords) -> Mapping[str, JsonObject]:
  found = run.step_blocks.get('blocks')
  blocks = found if isinstance(found, dict) else {}
  return {name: block for name, block in blocks.items() if isinstance(block, dict)}


def _rows(blocks: Mapping[str, JsonObject]) -> Iterator[list[str]]:
  names = ('flops', 'bytes', 'foreseen', 'measured')
  values = {n: {b: number(block.get(n)) for b, block in blocks.items()} for n in names}
  sums = {n: sum(x for x in of.values() if x is not None) for n, of in values.items()}
  share = lambda n, b: f'{(values[n][b] or 0.0) / sums[n]:.1%}' if sums[n] else '–'
  for block in sorted(blocks, key=block_order):
    seconds = (milliseconds(values[n][block]) for n in ('foreseen', 'measured'))
    yield [block, share('flops', block), share('bytes', block), *seconds, share('measured', block)]
  if blocks:
    all_seconds = (milliseconds(sums[n] or None) for n in ('foreseen', 'measured'))
    yield [ALL, *(['100.0%'] * 2), *all_seconds, '100.0%']


def _lost(blocks: Mapping[str, JsonObject]) -> float:
  """Returns the share of the measured seconds that is of no block."""
  seconds = {name: number(block.get('measured')) or 0.0 for name, block in blocks.items()}
  return seconds.get(UNKNOWN, 0.0) / (sum(seconds.values()) or 1.0)
