"""What steps were foreseen to take and what they took, as a table of a report."""

from collections.abc import Iterator, Mapping, Sequence

from paxlite.core.json_text import JsonObject
from paxlite.tools.report_page.records import RunRecords, number

HEADER = ['run', 'part of a step', 'foreseen', 'measured', 'measured / foreseen']
# the kernels of the foreseen step, as aot/step_parts.py divides them
KERNELS = {
  'products': 'matrix products',
  'attention': 'fused attention',
  'traffic': 'memory traffic of other kernels',
  'optimizer': 'optimizer and metrics',
}
# the same kernels by what they wait for, in runs of versions that wrote no others
_BOUNDS = {'compute_bound': 'matrix products and attention', 'memory_bound': 'other kernels'}
_WAITS = {
  'exposed': 'collectives that nothing hides',
  'exposed_host': 'copies from and to the host',
}


def table(runs: Sequence[RunRecords]) -> tuple[list[str], list[list[str]]]:
  """Returns rows for each run whose step was foreseen: its parts, the whole, and the memory."""
  return HEADER, [[run.name, *row] for run in runs if _is_known(run) for row in _rows(run)]


def notes(runs: Sequence[RunRecords]) -> list[str]:
  """Returns sentences about what the table does not have."""
  found = []
  if any(_is_known(run) for run in runs):
    found.append(
      'A part is what the program of the step was foreseen to take on its chip, as in `paxlite '
      'plan`. A step is measured as a whole: the median of several.'
    )
  others = [run for run in runs if not _is_known(run)]
  cpus = [run.name for run in others if run.versions.get('devices', '').endswith('cpu')]
  if cpus:
    found.append(f'Seconds on a CPU cannot be foreseen, as its speeds are unknown: {_names(cpus)}')
  rest = [run.name for run in others if run.name not in cpus]
  if rest:
    found.append(
      'Nothing was foreseen of these runs, which ended before 50 steps of a start, or ran on '
      f'devices whose speeds are unknown: {_names(rest)}'
    )
  return found


def _names(names: Sequence[str]) -> str:
  return ', '.join(names) + '.'


def _is_known(run: RunRecords) -> bool:
  return isinstance(run.foreseen.get('parts'), dict)


def _rows(run: RunRecords) -> Iterator[list[str]]:
  found = run.foreseen
  parts, kernels = found['parts'], found.get('kernels')
  if isinstance(kernels, dict) and kernels:
    yield from _seconds(kernels, KERNELS)
  else:
    yield from _seconds(parts, _BOUNDS)
  yield from _seconds(parts, _WAITS)
  waited = _waited(run)
  if waited is not None:
    yield ['host: waiting for data, the mean of all steps', '–', milliseconds(waited), '–']
  foreseen, measured = (number(found.get(f'{x}_seconds')) for x in ('foreseen', 'measured'))
  steps = number(found.get('measured_steps'))
  name = 'the whole step' + (f', the median of {steps:.0f}' if steps else '')
  chip = f' ({found.get("chip")})'
  yield [name + chip, milliseconds(foreseen), milliseconds(measured), _ratio(measured, foreseen)]
  memory = found.get('memory')
  memory = memory if isinstance(memory, dict) else {}
  foreseen, measured = (number(memory.get(f'{x}_bytes')) for x in ('foreseen', 'measured'))
  if foreseen is not None or measured is not None:
    yield ['memory of a device', _size(foreseen), _size(measured), _ratio(measured, foreseen)]


def _seconds(of: JsonObject, names: Mapping[str, str]) -> Iterator[list[str]]:
  """Yields a row for each part that takes time."""
  for name, text in names.items():
    if seconds := number(of.get(name)):
      yield [text, milliseconds(seconds), '–', '–']


def _waited(run: RunRecords) -> float | None:
  """Returns the seconds for which a step waited for its data; None if that is not known."""
  if run.goodput is None or not run.steps:
    return None
  return run.goodput.seconds['data'] / run.steps[-1]['step']


def _ratio(measured: float | None, foreseen: float | None) -> str:
  return f'{measured / foreseen:.2f}' if measured is not None and foreseen else '–'


def milliseconds(seconds: float | None) -> str:
  """Returns seconds as text: '486.7 ms', '0.0231 ms'; – for None."""
  if seconds is None:
    return '–'
  return f'{1e3 * seconds:,.1f} ms' if seconds >= 0.01 else f'{1e3 * seconds:.3g} ms'


def _size(count: float | None) -> str:
  if count is None:
    return '–'
  return f'{count / 2**30:.2f} GiB' if count >= 2**30 else f'{count / 2**20:.1f} MiB'
